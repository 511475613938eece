# The GPU side of LibTorch and NCCL for the module moonpipe_cuda. No GPU and no driver is needed to compile and link: what the wheel's
# libraries want from CUDA's own wheels is found by their RPATH when the program runs.
set(MOONPIPE_CUDA_DIR /usr/local/cuda CACHE PATH "CUDA toolkit with NCCL")
find_path(cuda_include cuda_runtime_api.h PATHS ${MOONPIPE_CUDA_DIR}/include NO_DEFAULT_PATH REQUIRED)
find_path(nccl_include nccl.h PATHS ${MOONPIPE_CUDA_DIR}/include REQUIRED)
find_library(cudart_library cudart PATHS ${MOONPIPE_CUDA_DIR}/lib64 NO_DEFAULT_PATH REQUIRED)
find_library(nccl_library nccl PATHS ${MOONPIPE_CUDA_DIR}/lib64 REQUIRED)
foreach(name c10_cuda torch_cuda)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${torch_lib}/lib${name}.so)
endforeach()

add_library(moonpipe_libtorch_cuda INTERFACE)
target_include_directories(moonpipe_libtorch_cuda SYSTEM INTERFACE ${cuda_include} ${nccl_include})
target_compile_definitions(moonpipe_libtorch_cuda INTERFACE USE_C10D_NCCL)
target_link_libraries(moonpipe_libtorch_cuda INTERFACE
  moonpipe_libtorch torch_cuda c10_cuda ${nccl_library} ${cudart_library})
# CUDA's part of LibTorch registers itself when it is loaded; nothing refers to its symbols.
target_link_options(moonpipe_libtorch_cuda INTERFACE -Wl,--no-as-needed)
