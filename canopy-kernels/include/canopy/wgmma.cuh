// Warpgroup products (sm_90a only): 64 rows a warpgroup, bf16 in, f32 accumulated, B in shared memory. Tiles lie in blocks of 64 columns,
// rows of 128 bytes whose 16-byte chunk c is stored at chunk c ^ (row & 7), on 1,024-byte boundaries.
#pragma once
#include "canopy/mma.cuh"

namespace canopy {

// The matrix descriptor of a tile at a shared-memory address. `blocks` is the distance of blocks of 64 columns, which matters where the
// columns are the output's (MN-major); eight rows are 1,024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t blocks) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(blocks >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

// A tile's descriptor, made once: a place further on differs in the lower word alone.
struct Described {
    uint32_t low;
    __device__ __forceinline__ Described(uint32_t address, uint32_t blocks) : low((uint32_t)descriptor(address, blocks)) {}
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const { return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | (low + (bytes >> 4)); }
};

// What this thread wrote to shared memory is what later products read.
__device__ __forceinline__ void writes_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_issued() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Left` groups of products are under way.
template <int Left>
__device__ __forceinline__ void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Keeps the compiler from moving uses of accumulators and operands across products that are under way.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void settle(uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// clang-format off
#define CANOPY_ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CANOPY_ACC8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define CANOPY_ACC32(d, i) CANOPY_ACC8(d, i), CANOPY_ACC8(d, i + 8), CANOPY_ACC8(d, i + 16), CANOPY_ACC8(d, i + 24)
// clang-format on

// d (+)= A B^T for 64 rows of B, both with the summed index along the row; d starts at 0 unless `add`.
__device__ __forceinline__ void products(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;}"
        : CANOPY_ACC32(d, 0)
        : "l"(a), "l"(b), "r"(add));
}

// d (+)= A B^T for 128 rows of B, both with the summed index along the row; d starts at 0 unless `add`.
__device__ __forceinline__ void products(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;}"
        : CANOPY_ACC32(d, 0), CANOPY_ACC32(d, 32)
        : "l"(a), "l"(b), "r"(add));
}

// d += A B for 128 columns of B, whose rows are the summed index; A in registers.
__device__ __forceinline__ void weighted(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : CANOPY_ACC32(d, 0), CANOPY_ACC32(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d += A B for 256 columns of B, whose rows are the summed index; A in registers.
__device__ __forceinline__ void weighted(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "
        "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
        : CANOPY_ACC32(d, 0), CANOPY_ACC32(d, 32), CANOPY_ACC32(d, 64), CANOPY_ACC32(d, 96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d += A B^T for 8 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[4], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
        : CANOPY_ACC4(d, 0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// d += A B^T for 16 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[8], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
        : CANOPY_ACC8(d, 0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// d += A B^T for 32 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[16], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : CANOPY_ACC8(d, 0), CANOPY_ACC8(d, 8)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// d += A B^T for 64 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[32], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : CANOPY_ACC32(d, 0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// d += A B^T for 128 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[64], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : CANOPY_ACC32(d, 0), CANOPY_ACC32(d, 32)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// d += A B^T for 256 rows of B with the summed index along the row; A in registers.
__device__ __forceinline__ void products(float (&d)[128], const uint4& a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "
        "%120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
        : CANOPY_ACC32(d, 0), CANOPY_ACC32(d, 32), CANOPY_ACC32(d, 64), CANOPY_ACC32(d, 96)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// Registers of a warpgroup's threads from here on: a role that needs few leaves them to the others.
template <int Registers>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// `threads` threads of the CTA meet.
__device__ __forceinline__ void crew_meets(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Tells warpgroup `crew` of two that it is its turn ...
template <int Threads>
__device__ __forceinline__ void turn_is(int crew) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + crew), "n"(Threads) : "memory");
}

// ... for which it waits.
template <int Threads>
__device__ __forceinline__ void await_turn(int crew) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + crew), "n"(Threads) : "memory");
}

}  // namespace canopy
