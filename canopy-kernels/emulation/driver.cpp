// The part of CUDA's driver interface that canopy-kernels' tests call, over emulation's threads: one device, memory of the host, every call
// done when it returns. Kernels are those that tools/emulated_device.py lists.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "kernels.h"
#include "threads.h"

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kNotFound = 500, kLaunchFailed = 719, kNotSupported = 801;
constexpr size_t kGuard = 256;
constexpr unsigned char kGuardByte = 0xa5, kFresh = 0xff;

// Buffers in use, each between two guards.
std::mutex lock;
std::map<char*, size_t>& buffers() {
    static std::map<char*, size_t> all;
    return all;
}

int allocate(void** out, size_t bytes) {
    char* memory = static_cast<char*>(aligned_alloc(kGuard, (bytes + 3 * kGuard - 1) / kGuard * kGuard));
    if (!memory) return 2;
    memset(memory, kGuardByte, kGuard);
    memset(memory + kGuard, kFresh, bytes);
    memset(memory + kGuard + bytes, kGuardByte, kGuard);
    const std::lock_guard<std::mutex> held(lock);
    buffers()[memory + kGuard] = bytes;
    *out = memory + kGuard;
    return kSuccess;
}

bool intact(const char* buffer, size_t bytes) {
    for (size_t i = 0; i < kGuard; ++i)
        if (static_cast<unsigned char>(buffer[bytes + i]) != kGuardByte || static_cast<unsigned char>(buffer[-1 - static_cast<long>(i)]) != kGuardByte) return false;
    return true;
}

int release(void* pointer) {
    char* buffer = static_cast<char*>(pointer);
    const std::lock_guard<std::mutex> held(lock);
    const auto found = buffers().find(buffer);
    if (found == buffers().end()) return kInvalidValue;
    if (!intact(buffer, found->second)) {
        fprintf(stderr, "emulation: a kernel wrote beyond a buffer of %zu bytes\n", found->second);
        abort();
    }
    buffers().erase(found);
    free(buffer - kGuard);
    return kSuccess;
}

// What an image is loaded as: all kernels, whose names are unique, under a fault of its own.
struct Module {
    int fault = 0;
};
struct Function {
    const emulation::Kernel* kernel;
    const Module* module;
};

int launch(const Function* function, emulation::Dim3 grid, emulation::Dim3 block, size_t shared_bytes, void** params) {
    const emulation::Kernel* kernel = function->kernel;
    if (kernel->fault) *kernel->fault() = function->module->fault;
    if (const char* wrong = emulation::run_grid(grid, block, kernel->shared ? kernel->shared() : nullptr, shared_bytes, [&] { kernel->call(params); })) {
        fprintf(stderr, "emulation: %s: %s\n", kernel->name, wrong);
        return kLaunchFailed;
    }
    return kSuccess;
}

// As in cuda.h.
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
};

int device_attribute(int attribute) {
    switch (attribute) {
        case 1: return 1024;                     // threads a block
        case 8: return 49152;                    // shared memory a block, unless it asks
        case 10: return 32;                      // lanes a warp
        case 16: return 16;                      // multiprocessors
        case 75: return 8;                       // compute capability
        case 81: return emulation::kMostShared;  // shared memory a multiprocessor
        case 97: return emulation::kMostShared;  // shared memory a block that asks
        case 115: return 1;                      // memory pools
        default: return 0;
    }
}

}  // namespace

const emulation::Kernel*& emulation::kernels() {
    static const Kernel* first = nullptr;
    return first;
}

extern "C" {

int cuInit(unsigned) { return kSuccess; }
int cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
int cuDeviceGet(int* device, int ordinal) { return *device = 0, ordinal == 0 ? kSuccess : 101; }
int cuDeviceGetName(char* name, int length, int) { return snprintf(name, length, "emulated device"), kSuccess; }
int cuDeviceGetUuid_v2(void* uuid, int) { return memset(uuid, 0, 16), kSuccess; }
int cuDeviceGetAttribute(int* value, int attribute, int) { return *value = device_attribute(attribute), kSuccess; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{8} << 30, kSuccess; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = reinterpret_cast<void*>(0x1000), kSuccess; }
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxSetCurrent(void*) { return kSuccess; }
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(0x1000), kSuccess; }
int cuCtxGetDevice(int* device) { return *device = 0, kSuccess; }
int cuCtxSynchronize() { return kSuccess; }

int cuStreamCreate(void** stream, unsigned) { return *stream = malloc(1), kSuccess; }
int cuStreamCreateWithPriority(void** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(void* stream) { return free(stream), kSuccess; }
int cuStreamSynchronize(void*) { return kSuccess; }
int cuStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0, kSuccess; }
int cuStreamBeginCapture_v2(void*, int) { return kNotSupported; }
int cuEventCreate(void** event, unsigned) { return *event = malloc(1), kSuccess; }
int cuEventDestroy_v2(void* event) { return free(event), kSuccess; }
int cuEventRecord(void*, void*) { return kSuccess; }
int cuEventQuery(void*) { return kSuccess; }
int cuEventSynchronize(void*) { return kSuccess; }

int cuMemAlloc_v2(void** pointer, size_t bytes) { return allocate(pointer, bytes); }
int cuMemAllocAsync(void** pointer, size_t bytes, void*) { return allocate(pointer, bytes); }
int cuMemFree_v2(void* pointer) { return release(pointer); }
int cuMemFreeAsync(void* pointer, void*) { return release(pointer); }
int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) { return *pointer = malloc(bytes), kSuccess; }
int cuMemFreeHost(void* pointer) { return free(pointer), kSuccess; }
int cuMemGetInfo_v2(size_t* left, size_t* total) { return *left = *total = size_t{8} << 30, kSuccess; }
int cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) { return memcpy(to, from, bytes), kSuccess; }
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void*) { return memcpy(to, from, bytes), kSuccess; }
int cuMemcpyDtoH_v2(void* to, const void* from, size_t bytes) { return memcpy(to, from, bytes), kSuccess; }
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void*) { return memcpy(to, from, bytes), kSuccess; }
int cuMemcpyDtoD_v2(void* to, const void* from, size_t bytes) { return memmove(to, from, bytes), kSuccess; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void*) { return memmove(to, from, bytes), kSuccess; }
int cuMemsetD8_v2(void* to, unsigned char value, size_t bytes) { return memset(to, value, bytes), kSuccess; }
int cuMemsetD8Async(void* to, unsigned char value, size_t bytes, void*) { return memset(to, value, bytes), kSuccess; }

int cuModuleLoadData(Module** module, const void*) { return *module = new Module, kSuccess; }
int cuModuleUnload(Module* module) { return delete module, kSuccess; }
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    for (const emulation::Kernel* kernel = emulation::kernels(); kernel; kernel = kernel->next)
        if (!strcmp(kernel->name, name)) return *function = new Function{kernel, module}, kSuccess;
    return kNotFound;
}
int cuModuleGetGlobal_v2(int** address, size_t* bytes, Module* module, const char* name) {
    if (strcmp(name, "canopy_fault")) return kNotFound;
    *address = &module->fault;
    *bytes = sizeof module->fault;
    return kSuccess;
}
int cuFuncGetAttribute(int* value, int, const Function*) { return *value = 0, kSuccess; }
int cuFuncSetAttribute(const Function*, int, int) { return kSuccess; }
int cuLaunchKernel(const Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes, void*,
                   void** params, void**) {
    return launch(function, {gx, gy, gz}, {bx, by, bz}, shared_bytes, params);
}
int cuLaunchKernelEx(const LaunchConfig* c, const Function* function, void** params, void**) {
    return launch(function, {c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]}, c->shared_bytes, params);
}

// A part of the device runs as the whole does.
int cuDeviceGetDevResource(int, void*, int) { return kSuccess; }
int cuDevSmResourceSplitByCount(void* part, unsigned*, const void*, void*, unsigned, unsigned least) {
    constexpr size_t kCount = 96;  // where CUdevResource has an SM resource's count
    return memcpy(static_cast<char*>(part) + kCount, &least, sizeof least), kSuccess;
}
int cuDevResourceGenerateDesc(void**, void*, unsigned) { return kSuccess; }
int cuGreenCtxCreate(void** context, void*, int, unsigned) { return *context = malloc(1), kSuccess; }
int cuGreenCtxDestroy(void* context) { return free(context), kSuccess; }
int cuGreenCtxStreamCreate(void** stream, void*, unsigned flags, int) { return cuStreamCreate(stream, flags); }

int cuGetErrorName(int, const char** name) { return *name = "emulation", kSuccess; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the emulated device; see standard error", kSuccess; }

}  // extern "C"
