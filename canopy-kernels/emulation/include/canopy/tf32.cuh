// The twin of include/canopy/tf32.cuh.
#pragma once
#include "canopy/mma.cuh"

namespace canopy {

inline void load_columns_of_rows(uint32_t (&r)[4], uint32_t address) {
    matrices(r, address, [](emulation::Meeting& m) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half) {
                    const int row = lane % 4 * 2 + half, column = lane / 4;
                    uint16_t value;
                    memcpy(&value, emulation::shared_at(m.in[8 * i + row][0]) + 2 * column, 2);
                    m.out[lane][i] = half ? m.out[lane][i] | static_cast<uint32_t>(value) << 16 : value;
                }
    });
}

inline float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
inline float to_tf32(float x) { return isfinite(x) ? cut_tf32(__uint_as_float(__float_as_uint(x) + 0x1000u)) : x; }
inline float nudged_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    const uint32_t words[4] = {__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]), __float_as_uint(a[3])};
    multiply(c, words, __float_as_uint(b0), __float_as_uint(b1), [](emulation::Meeting& m) {
        const auto cut = [](uint32_t word) { return __uint_as_float(word & 0xffffe000u); };
        product<8>(
            m, [cut](const emulation::Meeting& m, int row, int k) { return cut(m.in[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
            [cut](const emulation::Meeting& m, int k, int column) { return cut(m.in[column * 4 + k % 4][4 + k / 4]); });
    });
}

}  // namespace canopy
