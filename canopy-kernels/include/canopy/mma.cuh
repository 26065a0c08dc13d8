// Tensor-core fragments (m16n8k16, bf16 in, f32 accumulated) and asynchronous copies, as every target from sm_80 has them.
// Tiles lie in shared memory as rows of 128 bf16 (256 bytes); 16-byte chunk c of row r is stored at chunk c ^ (r & 7), which keeps
// ldmatrix free of bank conflicts.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

constexpr int kRowBytes = 256;

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// 16 bytes from global to shared memory; zeros when `valid` is false.
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Left` of this thread's groups are under way.
template <int Left>
__device__ __forceinline__ void copies_arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// The 16 x 16 A tile at (row0, k-step): rows of the tile by lane % 16, the two halves of k by lane / 16.
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t base, int row0, int step, int lane) {
    load_matrices(a, base + chunk_offset(row0 + lane % 16, 2 * step + lane / 16));
}

// B for eight columns (rows of the tile in memory) and two k-steps: b[0..1] is step 2 pair, b[2..3] step 2 pair + 1.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t base, int row0, int pair, int lane) {
    load_matrices(b, base + chunk_offset(row0 + lane % 8, 4 * pair + lane / 8));
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_bf16(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// What bf16 leaves of x; 0 where x is not finite, so that an infinity stays one.
__device__ __forceinline__ float residual(float x) {
    const float rest = x - __bfloat162float(__float2bfloat16_rn(x));
    return isfinite(rest) ? rest : 0.f;
}

}  // namespace canopy
