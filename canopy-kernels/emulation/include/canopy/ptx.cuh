// The twin of include/canopy/ptx.cuh in plain C++. A product's sums run in order of the summed index, in f32.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }

inline float power_of_two(float x) { return flushed(exp2f(flushed(x))); }
inline float add_flushed(float x, float y) { return flushed(flushed(x) + flushed(y)); }
inline float times_flushed(float x, float y) { return flushed(flushed(x) * flushed(y)); }
inline void add_in_memory(float2* to, float x, float y) { *to = {add_flushed(to->x, x), add_flushed(to->y, y)}; }
inline int anew(int x) { return x; }
inline float inverse_of(float x) { return flushed(1.f / flushed(x)); }
inline void ask_for(const void*) {}
inline uint4 stream16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum = 0;
    for (int half = 0; half < 2; ++half) {
        const auto value = [half](uint32_t pair) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); };
        sum |= static_cast<uint32_t>(__float2bfloat16_rn(fmaf(value(a), value(b), value(c))).bits) << 16 * half;
    }
    return sum;
}
template <int Threads>
inline void meet(int barrier) {
    emulation::meet_threads(barrier, Threads);
}

inline uint32_t shared_address(const void* p) { return emulation::shared_address_of(p); }
inline void copy16(uint32_t dst, const void* src, bool valid) { emulation::copy_later(emulation::shared_at(dst), src, valid); }
inline void copies_issued() { emulation::close_copies(); }
template <int Left>
inline void copies_arrived() {
    emulation::wait_for_copies(Left);
}

// Row r of matrix m is at the address of lane 8 m + r.
inline void matrices(uint32_t (&r)[4], uint32_t address, emulation::Together together) {
    const int lane = emulation::current % 32;
    emulation::Meeting& m = emulation::meeting();
    m.in[lane][0] = address;
    emulation::meet_lanes(together);
    for (int i = 0; i < 4; ++i) r[i] = m.out[lane][i];
}
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    matrices(r, address, [](emulation::Meeting& m) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) memcpy(&m.out[lane][i], emulation::shared_at(m.in[8 * i + lane / 4][0]) + 4 * (lane % 4), 4);
    });
}

// c += A B of a warp: lanes bring a in words 0 to 3, b in 4 and 5, and c in `out`. Element (row, k) of A, (k, column) of B.
template <int K, typename Left, typename Right>
inline void product(emulation::Meeting& m, Left left, Right right) {
    float a[16][K], b[K][8];
    for (int k = 0; k < K; ++k) {
        for (int row = 0; row < 16; ++row) a[row][k] = left(m, row, k);
        for (int column = 0; column < 8; ++column) b[k][column] = right(m, k, column);
    }
    for (int row = 0; row < 16; ++row) {
        float c[8];
        for (int column = 0; column < 8; ++column) c[column] = __uint_as_float(m.out[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2]);
        for (int k = 0; k < K; ++k)
            for (int column = 0; column < 8; ++column) c[column] += a[row][k] * b[k][column];
        for (int column = 0; column < 8; ++column) m.out[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2] = __float_as_uint(c[column]);
    }
}
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, emulation::Together together) {
    const int lane = emulation::current % 32;
    emulation::Meeting& m = emulation::meeting();
    for (int i = 0; i < 4; ++i) {
        m.in[lane][i] = a[i];
        m.out[lane][i] = __float_as_uint(c[i]);
    }
    m.in[lane][4] = b0;
    m.in[lane][5] = b1;
    emulation::meet_lanes(together);
    for (int i = 0; i < 4; ++i) c[i] = __uint_as_float(m.out[lane][i]);
}

inline float half_of(uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply(c, a, b0, b1, [](emulation::Meeting& m) {
        product<16>(
            m, [](const emulation::Meeting& m, int row, int k) { return half_of(m.in[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2); },
            [](const emulation::Meeting& m, int k, int column) { return half_of(m.in[column * 4 + k % 8 / 2][4 + k / 8], k % 2); });
    });
}

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

inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
    const uint32_t words[4] = {__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]), __float_as_uint(a[3])};
    multiply(c, words, __float_as_uint(b0), __float_as_uint(b1), [](emulation::Meeting& m) {
        const auto cut = [](uint32_t word) { return __uint_as_float(word & 0xffffe000u); };
        product<8>(
            m, [cut](const emulation::Meeting& m, int row, int k) { return cut(m.in[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
            [cut](const emulation::Meeting& m, int k, int column) { return cut(m.in[column * 4 + k % 4][4 + k / 4]); });
    });
}
inline float to_tf32(float x) { return isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u) : x; }

}  // namespace canopy
