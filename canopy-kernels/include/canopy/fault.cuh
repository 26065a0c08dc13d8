// Faults that the contract plants (src/contract): with CANOPY_CONTROLS a source is compiled once more, and one fault at a time is picked in
// it by number, as in the emulation. Without, CANOPY_FAULT is the constant false and nothing of it is left in a kernel.
#pragma once
#include <stdint.h>

namespace canopy {

enum class Fault : int {
    none,
    short_path,     // a path loses its root
    score_scale,    // attention scores times 17/16
    window,         // a window one key short
    causal,         // a row sees the one after it
    dropped_slice,  // one of the parts of a sum is left out
    early_fetch,    // a tile is fetched into the stage that is being read
    stale,          // what should have been fetched is still the last one's
    one_ulp,        // a constant factor is off by a unit in the last place
    half_sum,       // sums are kept in bfloat16
    leak,           // zero times what a row does not see
    swallow,        // what is not finite becomes finite
    off_by_one,     // a place, or a position, one too far
    early_branch,   // a shortcut for large values taken too early
    row_order,      // the row before instead of the parent
    missed_node,    // the last node of a path is left out
    gap,            // the last output is not written
    overrun,        // one element past the outputs is written
    touched,        // an input is written
};

}  // namespace canopy

#if defined(CANOPY_CONTROLS) || defined(CANOPY_EMULATED)
#define CANOPY_FAULTS
extern "C" {
__constant__ int canopy_fault = 0;
}
#define CANOPY_FAULT(name) (canopy_fault == static_cast<int>(canopy::Fault::name))
#else
#define CANOPY_FAULT(name) false
#endif

namespace canopy {

// x, one unit in the last place larger under the fault.
__device__ __forceinline__ float planted_ulp(float x) {
    return CANOPY_FAULT(one_ulp) ? __uint_as_float(__float_as_uint(x) + 1u) : x;
}

// A running sum, rounded to bfloat16 (halves away from zero) under the fault; not finite values stay so.
__device__ __forceinline__ float planted_half(float x) {
    return CANOPY_FAULT(half_sum) ? __uint_as_float((__float_as_uint(x) + 0x8000u) & 0xffff0000u) : x;
}

__device__ __forceinline__ float4 planted_half(float4 x) {
    return make_float4(planted_half(x.x), planted_half(x.y), planted_half(x.z), planted_half(x.w));
}

// What is not finite becomes a large number under the fault, as a careless minimum makes it.
__device__ __forceinline__ float planted_swallow(float x) { return CANOPY_FAULT(swallow) ? fmaxf(fminf(x, 3e38f), -3e38f) : x; }

__device__ __forceinline__ float4 planted_swallow(float4 x) {
    return make_float4(planted_swallow(x.x), planted_swallow(x.y), planted_swallow(x.z), planted_swallow(x.w));
}

// Writes to an input under the fault; one thread of a grid calls it.
template <typename T>
__device__ __forceinline__ void planted_touch(const T* input) {
    if (CANOPY_FAULT(touched)) *reinterpret_cast<volatile unsigned short*>(const_cast<T*>(input)) = 0x4000;
}

}  // namespace canopy
