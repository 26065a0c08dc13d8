// The threads of a CUDA grid on one CPU thread: a fiber each, in warps of 32, started in random order and switched where they wait.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

constexpr int kLanes = 32, kMostThreads = 1024, kMostShared = 232448, kSharedBuffer = kMostShared + 1024;

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// What the lanes of a warp bring to an operation that they do together, and what each takes from it.
struct Meeting {
    alignas(64) uint32_t in[kLanes][8];
    alignas(64) uint32_t out[kLanes][4];
    uint32_t present;  // lanes that have not ended
};
using Together = void (*)(Meeting&);

extern thread_local Dim3 block_index, grid_size, block_size;
extern thread_local int current;  // thread of the block that runs now

// This lane's place in its warp's meeting.
Meeting& meeting();
// Waits for all lanes of the warp that have not ended; `together` runs once, when the last has come. Lanes that meet in different operations
// are a fault of the kernel and end the process.
void meet_lanes(Together together);
// Waits for `threads` threads at barrier `number` (0 to 15); 0 threads: all of the block that have not ended.
void meet_threads(int number, int threads);
// meet_threads(0, 0); whether any thread's `value` was true.
bool any_thread(bool value);
// A 16-byte copy into shared memory (zeros if not `valid`) that takes effect at once or as late as its group allows, at random.
void copy_later(char* to, const void* from, bool valid);
void close_copies();
void wait_for_copies(int groups_left);

// Runs a grid. `shared`, of kSharedBuffer bytes or null, starts as NaN in every block; a byte written beyond `shared_bytes` is an error.
// Returns nullptr, or what went wrong.
const char* run_grid(Dim3 grid, Dim3 block, char* shared, size_t shared_bytes, const std::function<void()>& kernel);

// Shared memory of the grid that runs, as 32-bit addresses.
uint32_t shared_address_of(const void* p);
char* shared_at(uint32_t address);

}  // namespace emulation
