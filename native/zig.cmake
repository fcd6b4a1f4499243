# Compiles for any platform with zig, which pip installs:
# cmake -S . -B build -DCMAKE_TOOLCHAIN_FILE=native/zig.cmake -DZIG=zig -DZIG_TARGET=aarch64-linux-gnu.2.28
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR ${ZIG_TARGET})
if(ZIG_TARGET MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER ${ZIG})
elseif(ZIG_TARGET MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
# Without -target, zig compiles for the processor that it runs on. As "zig cc" it knows C++ by the name of the file, and
# does not build the C++ library, which ringtile does without.
set(CMAKE_C_COMPILER ${ZIG} cc -target ${ZIG_TARGET})
set(CMAKE_CXX_COMPILER ${CMAKE_C_COMPILER})
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG ZIG_TARGET)
