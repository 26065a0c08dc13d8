// The words of a sequence's plan (tree_gdn/plan.rs says what it is), for who reads one and who writes one; for the host's compiler too.
#pragma once
#include <stdint.h>

#include <type_traits>

#ifdef __CUDACC__
#define CANOPY_INLINE __device__ __forceinline__
#else
#define CANOPY_INLINE inline
#endif

namespace canopy {

// plan.rs AS_GIVEN: so many nodes are counted as their rows lie, more of them depth first.
constexpr int kAsGiven = 32;

CANOPY_INLINE uint32_t in_multiples(uint32_t n, uint32_t of) { return (n + of - 1) / of * of; }

// Of const words or of words that are written.
template <typename Word>
struct PlanOf {
    using Byte = std::conditional_t<std::is_const_v<Word>, const uint8_t, uint8_t>;

    uint32_t steps, items, entries, max_depth;
    Byte* row_of;       // [nodes] row of every node
    Word* info;         // [nodes] depth | first entry / 4 << 8
    Word* tiles;        // [ceil(nodes / 16)] column tiles of eight nodes that hold a path node of these sixteen nodes
    Word* ends;         // [steps] items up to the end of the step
    Word* item;         // [items][2] first position in order | count << 16; first depth | end depth << 16 (0xffff: to the end)
    Byte* path;         // [entries] nodes of every root path
    Byte* mask;         // [nodes][nodes / 8 rounded up to 4] bit j % 8 of byte j / 8: j is on the node's root path
    uint32_t mask_row;  // bytes of a node
    Byte* rows;         // [entries / 4] node of four entries
    Word* order;        // nodes of the items: node | depth << 8 | first entry / 4 << 16

    // Where everything lies.
    CANOPY_INLINE PlanOf(Word* words, uint32_t nodes, uint32_t steps, uint32_t items, uint32_t entries, uint32_t max_depth)
        : steps(steps), items(items), entries(entries), max_depth(max_depth) {
        row_of = rows_of(words);
        info = words + 4 + in_multiples(nodes, 16) / 4;
        tiles = info + in_multiples(nodes, 4);
        ends = tiles + 16;
        item = ends + in_multiples(steps, 4);
        path = reinterpret_cast<Byte*>(item + in_multiples(2 * items, 4));
        mask = path + in_multiples(entries, 16);
        mask_row = (nodes + 31) / 32 * 4;
        rows = mask + in_multiples(nodes * mask_row, 16);
        order = reinterpret_cast<Word*>(rows + in_multiples(entries / 4, 16));
    }

    CANOPY_INLINE static Byte* rows_of(Word* words) { return reinterpret_cast<Byte*>(words + 4); }
};

using Plan = PlanOf<const uint32_t>;

CANOPY_INLINE Plan read_plan(const uint32_t* words, int nodes) { return Plan(words, nodes, words[0], words[1], words[2], words[3]); }

}  // namespace canopy
