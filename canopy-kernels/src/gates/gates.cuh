// The gates of one value head of one packed row: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), all f32.
// softplus is log1p(exp(x)) for x <= 20 and x above, so neither branch overflows; 0 * infinity is avoided by taking g = 0 where
// softplus underflows to 0.
#pragma once
#include <stdint.h>

#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"

namespace canopy {

// ab, out [rows, 2, v_heads], a_log, dt_bias [v_heads].
template <typename T>
struct Gates {
    uint32_t rows, v_heads;
    const T* ab;
    const float* a_log;
    const float* dt_bias;
    float* out;

    __device__ __forceinline__ void operator()(uint32_t row, uint32_t h) const {
        const size_t plane = (size_t)row * 2 * v_heads + h;
        float x = planted_half(to_f32(ab[plane]) + dt_bias[h]);
        if (CANOPY_FAULT(leak)) x = fmaf(0.f, to_f32(ab[0]), x);
        const float soft = x > (CANOPY_FAULT(early_branch) ? 1.f : 20.f) ? x : log1pf(expf(x));
        const float rate = a_log[h];
        // exp(A_log) may overflow while the product does not: fold the exponent into the small factor.
        const float g = soft == 0.f ? 0.f : -expf(rate * 0.5f) * soft * expf(rate * 0.5f);
        const float b = to_f32(ab[plane + v_heads]);
        if (CANOPY_FAULT(gap) && row + 1 == rows && h + 1 == v_heads) return;
        if (CANOPY_FAULT(overrun)) out[2 * (size_t)rows * v_heads] = 0.f;
        if (plane == 0) planted_touch(ab);
        out[plane] = planted_ulp(g);
        out[plane + v_heads] = 1.f / (1.f + expf(-b));
    }
};

}  // namespace canopy
