# LibTorch from the pinned wheel, by our own imported targets: torch's package file would demand the CUDA compiler, define an
# empty protobuf::libprotobuf and link the GPU libraries. The CPU build links torch_cpu and c10 only.
set(torch_lib ${MOONPIPE_TORCH_DIR}/torch/lib)
if(NOT EXISTS ${torch_lib}/libtorch_cpu.so)
  message(FATAL_ERROR "LibTorch is not in ${MOONPIPE_TORCH_DIR}; run scripts/setup first")
endif()
foreach(name c10 torch_cpu)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${torch_lib}/lib${name}.so)
endforeach()

# The wheel carries protobuf headers of another version; a folder that links to the system's must be searched first.
set(system_protobuf_include ${CMAKE_BINARY_DIR}/system-protobuf)
file(MAKE_DIRECTORY ${system_protobuf_include})
find_path(google_include google/protobuf/message.h PATHS /usr/include NO_DEFAULT_PATH REQUIRED)
file(CREATE_LINK ${google_include}/google ${system_protobuf_include}/google SYMBOLIC)

add_library(moonpipe_libtorch INTERFACE)
target_include_directories(moonpipe_libtorch SYSTEM INTERFACE
  ${system_protobuf_include}
  ${MOONPIPE_TORCH_DIR}/torch/include
  ${MOONPIPE_TORCH_DIR}/torch/include/torch/csrc/api/include)
# The CUDA runtime libraries that torch_cpu loads are found by its own RPATH when the program runs.
# Our own at::parallel_for must run on the OpenMP runtime that torch has: the wheel's.
target_link_libraries(moonpipe_libtorch INTERFACE torch_cpu c10 ${torch_lib}/libgomp.so.1)
target_link_options(moonpipe_libtorch INTERFACE -Wl,--allow-shlib-undefined)
list(APPEND CMAKE_BUILD_RPATH ${torch_lib})

# One precompiled header for every unit that includes torch: 0.7 GB, so it is shared by REUSE_FROM.
file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cc "")
add_library(moonpipe_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cc)
target_link_libraries(moonpipe_torch_pch PRIVATE moonpipe_libtorch moonpipe_warnings)
target_precompile_headers(moonpipe_torch_pch PRIVATE <torch/torch.h>)
