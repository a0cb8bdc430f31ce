/* Stands in for the driver's library where there is no driver: cuDNN looks these functions up before it compiles
   kernels, and CUDA_ERROR_NOT_INITIALIZED tells it that there is no GPU to load them on. */

#define MISSING(name) \
    int name(void) { return 3; }

MISSING(cuCtxGetCurrent)
MISSING(cuCtxGetLimit)
MISSING(cuCtxPopCurrent)
MISSING(cuCtxPushCurrent)
MISSING(cuDeviceGet)
MISSING(cuDeviceGetCount)
MISSING(cuDriverGetVersion)
MISSING(cuGetErrorName)
MISSING(cuGetErrorString)
MISSING(cuKernelGetAttribute)
MISSING(cuKernelSetAttribute)
MISSING(cuLaunchCooperativeKernel)
MISSING(cuLaunchKernel)
MISSING(cuLaunchKernelEx)
MISSING(cuLibraryGetKernel)
MISSING(cuLibraryLoadData)
MISSING(cuLibraryLoadFromFile)
MISSING(cuLibraryUnload)
MISSING(cuLinkAddData)
MISSING(cuLinkComplete)
MISSING(cuLinkCreate)
MISSING(cuLinkDestroy)
MISSING(cuOccupancyMaxPotentialClusterSize)
MISSING(cuStreamGetCtx)
