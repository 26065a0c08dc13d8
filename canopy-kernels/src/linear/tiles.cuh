// How weights lie in memory: tiles of 16 outputs by chunks of 128 inputs, in the order in which a warp's lanes hold A of m16n8k16. A lane has the
// outputs lane / 4 and lane / 4 + 8 of a tile, and of a step of 16 inputs the ones at 2 (lane % 4), the next, and 8 behind both.
#pragma once
#include "args.cuh"
#include "canopy/bulk.cuh"
#include "canopy/fault.cuh"
#include "canopy/ptx.cuh"

namespace canopy {

constexpr int kSteps = 8;  // of 16 inputs in a chunk

__device__ __forceinline__ uint32_t tiles_of(const LinearArgs& a, uint32_t block) { return min(8u, a.tiles - block * 8); }

// 16 bytes a lane and step; the chunks of a tile lie one after another.
struct Bf16Tiles {
    static constexpr uint32_t kTileBytes = 16 * 128 * 2;
    static constexpr int kGroups = 1;  // of steps that are read, then multiplied

    // A tile of a block; its next chunk is `stride` bytes on.
    static __device__ __forceinline__ size_t place(const LinearArgs& a, uint32_t block, uint32_t tile, uint32_t chunk) {
        return ((size_t)(block * 8 + tile) * a.chunks + chunk) * kTileBytes;
    }
    static __device__ __forceinline__ uint32_t stride(const LinearArgs&, uint32_t) { return kTileBytes; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // A block's chunk to shared memory.
    static __device__ __forceinline__ void copy(const LinearArgs& a, const uint8_t* weight, uint32_t block, uint32_t chunk, uint32_t to,
                                                uint32_t barrier) {
        for (uint32_t t = 0; t < tiles_of(a, block); ++t)
            copy_bulk(to + t * kTileBytes, weight + place(a, block, t, chunk), kTileBytes, barrier);
    }
#endif

    // What a lane has of a tile in shared memory.
    struct Lane {
        const uint4* at;

        __device__ __forceinline__ Lane(const uint8_t* tile, int lane) : at(reinterpret_cast<const uint4*>(tile) + lane) {}

        template <int Group>
        __device__ __forceinline__ void read(uint4 (&w)[kSteps]) const {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) w[s] = at[s * 32];
        }
    };

    // What a lane has under way of a tile in global memory.
    struct Ahead {
        uint4 w[kSteps];

        __device__ __forceinline__ void fetch(const uint8_t* tile, int lane, int pair) {
            w[2 * pair] = stream16(tile + (2 * pair * 32 + lane) * 16);
            w[2 * pair + 1] = stream16(tile + ((2 * pair + 1) * 32 + lane) * 16);
        }

        __device__ __forceinline__ void take(int pair, uint4 (&a)[2]) {
            a[0] = w[2 * pair];
            a[1] = w[2 * pair + 1];
        }
    };
};

// A row's scale in both halves of a word, and -128 times it.
struct Scale {
    uint32_t one, base;

    __device__ __forceinline__ explicit Scale(uint32_t bits) : one(bits * 0x10001u) {
        const float least = -128.f * __uint_as_float(bits << 16);
        base = pack_bf16(least, least);
    }

    // Two values of a word: magnitudes in bits 0 to 6 and 16 to 22, signs in bits 15 and 31. With the exponent of 128 in front of a magnitude m
    // it is 128 + m, and one multiply-add makes m times the scale of it, rounded once.
    __device__ __forceinline__ uint32_t times(uint32_t word) const {
        const uint32_t value = (word & 0x807f807fu) | 0x43004300u, rest = (word & 0x80008000u) ^ base;
        return fma_pairs(value, one, rest);
    }
};

// int8 with a bf16 scale for every output and chunk: of two steps a lane has 16 bytes, a word an output and step, and behind them lie the scales.
// The chunks of a block of eight tiles lie one after another.
struct Int8Tiles {
    static constexpr uint32_t kValueBytes = 16 * 128, kTileBytes = kValueBytes + 32;
    static constexpr int kGroups = 2;

    static __device__ __forceinline__ size_t place(const LinearArgs& a, uint32_t block, uint32_t tile, uint32_t chunk) {
        return ((size_t)block * 8 * a.chunks + (size_t)chunk * tiles_of(a, block) + tile) * kTileBytes;
    }
    static __device__ __forceinline__ uint32_t stride(const LinearArgs& a, uint32_t block) { return tiles_of(a, block) * kTileBytes; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static __device__ __forceinline__ void copy(const LinearArgs& a, const uint8_t* weight, uint32_t block, uint32_t chunk, uint32_t to,
                                                uint32_t barrier) {
        copy_bulk(to, weight + place(a, block, 0, chunk), stride(a, block), barrier);
    }
#endif

    // The bytes of both pairs of a word: the second pair's magnitudes are one byte up, its signs one byte down.
    static __device__ __forceinline__ void widen(const Scale& scale, uint32_t word, uint32_t& first, uint32_t& second) {
        first = scale.times(word);
        second = scale.times(__byte_perm(word, word, 0x2301));
    }

    static __device__ __forceinline__ void widen(const Scale& low, const Scale& high, uint4 pair, uint4 (&a)[2]) {
        widen(low, pair.x, a[0].x, a[0].z);
        widen(high, pair.y, a[0].y, a[0].w);
        widen(low, pair.z, a[1].x, a[1].z);
        widen(high, pair.w, a[1].y, a[1].w);
    }

    static __device__ __forceinline__ const uint16_t* scale_of(const uint8_t* tile, int lane, int half) {
        const int row = lane / 4 + half * 8;
        return reinterpret_cast<const uint16_t*>(tile + kValueBytes) + (CANOPY_FAULT(row_order) && row > 0 ? row - 1 : row);
    }

    struct Lane {
        const uint4* at;
        Scale low, high;

        __device__ __forceinline__ Lane(const uint8_t* tile, int lane)
            : at(reinterpret_cast<const uint4*>(tile) + lane), low(*scale_of(tile, lane, 0)), high(*scale_of(tile, lane, 1)) {}

        template <int Group>
        __device__ __forceinline__ void read(uint4 (&w)[kSteps / 2]) const {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                uint4 a[2];
                widen(low, high, at[(Group * 2 + pair) * 32], a);
                w[2 * pair] = a[0];
                w[2 * pair + 1] = a[1];
            }
        }
    };

    struct Ahead {
        uint4 w[kSteps / 2];
        uint32_t coming[2];
        Scale low{0}, high{0};

        __device__ __forceinline__ void fetch(const uint8_t* tile, int lane, int pair) {
            w[pair] = stream16(tile + (pair * 32 + lane) * 16);
            if (pair == 0)
#pragma unroll
                for (int half = 0; half < 2; ++half) coming[half] = __ldg(scale_of(tile, lane, half));
        }

        __device__ __forceinline__ void take(int pair, uint4 (&a)[2]) {
            if (pair == 0) {
                low = Scale(coming[0]);
                high = Scale(coming[1]);
            }
            widen(low, high, w[pair], a);
        }
    };
};

}  // namespace canopy
