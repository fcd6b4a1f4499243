"""Build the wheels of every platform on one machine, check them, and try those that run here: python scripts/wheels.py

dist/ then contains the source distribution, the pure wheel and one wheel per platform. zig compiles the native kernel
for each platform, so one wheel per platform works with every Python and torch. The pure wheel is for all other
platforms. The script installs its tools into the running environment and builds in .venv/wheels.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from environment import CONSTRAINTS, ROOT, run

WORK = ROOT / ".venv" / "wheels"
DIST = ROOT / "dist"
TOOLS = ("build", "wheel", "lief", "ziglang", "cmake", "ninja")
LARGEST = 2 << 20
ADDED_BY_LINKERS = {"_mh_dylib_header", "__dso_handle"}


class Platform(NamedTuple):
    tag: str
    target: str
    library: str
    imports: str
    """The only libraries that it can need, as a regular expression."""
    runners: tuple[str, ...]
    """Programs that run its driver on x86-64 Linux. The first one found does."""


PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "libringtile.so", r"lib(c|m|pthread)\.so\.\d", ("env",)),
    Platform(
        "manylinux_2_28_aarch64",
        "aarch64-linux-gnu.2.28",
        "libringtile.so",
        r"lib(c|m|pthread)\.so\.\d",
        ("qemu-aarch64",),
    ),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "libringtile.dylib", r"/usr/lib/libSystem\.B\.dylib", ()),
    Platform(
        "win_amd64",
        "x86_64-windows-gnu",
        "libringtile.dll",
        r"KERNEL32\.dll|api-ms-win-crt-[\w-]+\.dll",
        ("wine64", "/usr/lib/wine/wine64", "wine"),
    ),
)


def tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def compiled(made: Platform) -> Path:
    """Compile the native kernel and its driver for a platform. Return the folder of both."""
    import ziglang

    zig, folder = Path(ziglang.__file__).with_name("zig"), WORK / made.tag
    toolchain = (f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'native/zig.cmake'}", f"-DZIG={zig}", f"-DZIG_TARGET={made.target}")
    # SKBUILD: the library stays in the build folder.
    options = ("-DSKBUILD=1", "-GNinja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *toolchain)
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"), "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig")}
    run(tool("cmake"), "--log-level=NOTICE", "-S", ".", "-B", folder, *options, **caches)
    run(tool("cmake"), "--build", folder, "--target", "ringtile", "driver", **caches)
    return folder


def packed(made: Platform, pure: Path, library: Path) -> Path:
    """Make a wheel from the pure one, a library and its platform's tag."""
    folder = WORK / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "wheel", "unpack", "--dest", folder, pure)
    (content,) = folder.iterdir()
    (content / "ringtile/lib").mkdir()
    shutil.copy(library, content / "ringtile/lib")
    (about,) = content.glob("*.dist-info/WHEEL")
    text = re.sub("(?m)^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", about.read_text())
    about.write_text(re.sub("(?m)^Tag: .*$", f"Tag: py3-none-{made.tag}", text))
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", DIST, content)
    return next(DIST.glob(f"*-{made.tag}.whl"))


def check(made: Platform, library: Path, wheel: Path) -> None:
    """Stop if a library lacks a function that Python calls, needs others than the system's, or belies its tag."""
    import lief

    from ringtile.kernels.native.library import _FUNCTIONS

    seen = lief.parse(library)
    exports = {function.name.removeprefix("_" if "macos" in made.tag else "") for function in seen.exported_functions}
    exports -= ADDED_BY_LINKERS
    needs = [str(getattr(each, "name", each)) for each in (seen.imports if "win" in made.tag else seen.libraries)]
    # On macOS, a library lists its own name first.
    needs = [name for name in needs if name != f"@rpath/{made.library}"]
    wrong = [f"needs {name}" for name in needs if not re.fullmatch(made.imports, name)]
    wrong += [f"exports {name}" for name in exports ^ {f"ringtile_{name}" for name in _FUNCTIONS}]
    if "linux" in made.tag:
        symbols = [aux.name for need in seen.symbols_version_requirement for aux in need.get_auxiliary_symbols()]
        newest = max(tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in symbols)
        needs.append(f"glibc {newest[0]}.{newest[1]}")
        wrong += [needs[-1]] * (newest > (2, 28))
    if "macos" in made.tag:
        needs.append(f"macOS {seen.build_version.minos[0]}")
        wrong += [needs[-1]] * (seen.build_version.minos[0] > 11)
    if wrong or wheel.stat().st_size > LARGEST:
        raise SystemExit(f"{wheel.name}, {wheel.stat().st_size:,} bytes (at most {LARGEST:,}): {', '.join(wrong)}")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(exports)} exports, needs {', '.join(needs)}", flush=True)


def drive(made: Platform, folder: Path) -> str:
    """Run a platform's driver if a program for it is here. Return the outcome."""
    program = next(filter(None, map(shutil.which, made.runners)), None)
    if program is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"{made.tag}: built and checked, not run here"
    driver = next(path for path in (folder / "driver", folder / "driver.exe") if path.exists())
    sysroot = ("-L", "/usr/aarch64-linux-gnu") if "qemu" in program else ()
    variables = {**os.environ, "WINEDEBUG": "-all"}
    done = subprocess.run([program, *sysroot, driver, "12"], capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{made.tag}: the driver fails:\n{done.stdout}{done.stderr}")
    return f"{made.tag}: its driver ran; {'; '.join(done.stdout.split(chr(10))[:-1])}"


def use_wheel() -> None:
    """Run the wheel that pip chooses for this machine in a fresh environment, with no program on PATH."""
    folder = WORK / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    install = ("--quiet", "--no-index", "--no-deps", "--find-links", DIST, "ringtile")
    run(folder / "bin/python", "-m", "pip", "install", *install)
    own = next(folder.glob("lib/*/site-packages"))
    (own / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    run(folder / "bin/python", "-I", "-W", "error", ROOT / "scripts/try_install.py", PATH="/nowhere")


def main() -> None:
    pins = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    run(sys.executable, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *TOOLS)
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "-Cwheel.cmake=false", "--outdir", DIST, ".", **pins)
    (pure,) = DIST.glob("*-py3-none-any.whl")
    told = []
    for made in PLATFORMS:
        folder = compiled(made)
        check(made, folder / made.library, packed(made, pure, folder / made.library))
        told.append(drive(made, folder))
    print(*told, sep="\n", flush=True)
    use_wheel()


if __name__ == "__main__":
    main()
