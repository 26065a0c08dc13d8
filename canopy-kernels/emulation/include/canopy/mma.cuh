// The twin of include/canopy/mma.cuh: its fragments and copies in plain C++. A product's sums run in order of the summed index, in f32.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

constexpr int kRowBytes = 256;

inline uint32_t shared_address(const void* p) { return emulation::shared_address_of(p); }
inline uint32_t chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

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

inline void load_a(uint32_t (&a)[4], uint32_t base, int row0, int step, int lane) {
    load_matrices(a, base + chunk_offset(row0 + lane % 16, 2 * step + lane / 16));
}
inline void load_b(uint32_t (&b)[4], uint32_t base, int row0, int pair, int lane) {
    load_matrices(b, base + chunk_offset(row0 + lane % 8, 4 * pair + lane / 8));
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

inline uint32_t pack_bf16(float x, float y) { return same_bits<uint32_t>(__floats2bfloat162_rn(x, y)); }

inline float residual(float x) {
    const float rest = x - __bfloat162float(__float2bfloat16_rn(x));
    return isfinite(rest) ? rest : 0.f;
}

}  // namespace canopy
