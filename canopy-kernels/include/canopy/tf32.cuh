// Products on tf32 (m16n8k8, f32 accumulated), as every target from sm_80 has them, and f32 in tf32 parts; 8 x 8 matrices read transposed.
#pragma once
#include "canopy/mma.cuh"

namespace canopy {

// As load_matrices, every matrix transposed.
__device__ __forceinline__ void load_columns_of_rows(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// m16n8k8 on tf32 operands: of a and b the low 13 bits do not count.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// x to the nearest tf32.
__device__ __forceinline__ float to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

// x without the bits that tf32 has no room for.
__device__ __forceinline__ float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// A finite x to the nearest tf32, its low bits left as they are.
__device__ __forceinline__ float nudged_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

}  // namespace canopy
