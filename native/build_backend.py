"""The build backend: scikit-build-core, and a wheel without the native kernel if that cannot be compiled.

scikit-build-core has an override for failed builds, but with it offers no metadata without a build: pip then compiles
everything before it knows what to install, and again for the wheel.
"""

from __future__ import annotations

from collections.abc import Callable

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 - the hooks that are offered depend on pyproject.toml

Settings = dict[str, list[str] | str]


def build_wheel(directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None) -> str:
    """Build a wheel, with the native kernel if it can be compiled."""
    return _built(build.build_wheel, directory, config_settings, metadata_directory)


def build_editable(
    directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel, with the native kernel if it can be compiled."""
    return _built(build.build_editable, directory, config_settings, metadata_directory)


def _built(
    hook: Callable[[str, Settings | None, str | None], str],
    directory: str,
    settings: Settings | None,
    metadata: str | None,
) -> str:
    pure: Settings = {**(settings or {}), "wheel.cmake": "false"}
    try:
        return hook(directory, settings, metadata)
    except SystemExit:
        if settings == pure:
            raise
    print("\n*** The native CPU kernel was not built (see above). ringtile works without it, only slower.", flush=True)
    # Without the metadata made before, whose tag is that of a wheel with the kernel.
    return hook(directory, pure, None)
