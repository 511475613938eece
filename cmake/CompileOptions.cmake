# Options that every translation unit shares. They stand here, global and first, because a precompiled header is refused
# wherever one of them differs.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2")
# -fopenmp: at::parallel_for in our own code is serial without it. It uses the libgomp of the wheel.
add_compile_options(-pthread -fopenmp -fno-omit-frame-pointer)
add_link_options(-pthread)
add_compile_definitions(USE_C10D_GLOO)
if(MOONPIPE_SANITIZER)
  add_compile_options(-fsanitize=${MOONPIPE_SANITIZER} -g1)
  add_link_options(-fsanitize=${MOONPIPE_SANITIZER})
endif()

find_program(ccache_program ccache)
if(ccache_program AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${ccache_program})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ccache_program})
endif()

# Warnings are errors on our own code only; generated code and dependencies are SYSTEM.
add_library(moonpipe_warnings INTERFACE)
target_compile_options(moonpipe_warnings INTERFACE -Wall -Wextra -Wconversion -Wno-sign-conversion -Wshadow -Werror)
# GCC 12 takes the sanitizers' own code for reads of unset members, in the library's <regex> for one.
if(MOONPIPE_SANITIZER)
  target_compile_options(moonpipe_warnings INTERFACE -Wno-maybe-uninitialized)
endif()
