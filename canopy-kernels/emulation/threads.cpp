#include "threads.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace emulation {
namespace {

#if !defined(__x86_64__)
#error "the emulation switches threads with x86-64 instructions"
#endif

// Saves this stack's registers and goes on where `to` was left.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

constexpr size_t kStack = 256 << 10;
constexpr unsigned char kUnset = 0xff;

struct Copy {
    char* to;
    const void* from;
    bool valid;
    void land() const {
        if (valid) memcpy(to, from, 16);
        else memset(to, 0, 16);
    }
};

struct Fiber {
    void* stack = nullptr;
    void* at = nullptr;
    std::vector<std::vector<Copy>> groups;  // the last one is open
};

struct Barrier {
    int arrived = 0, wanted = 0;
    bool any = false, result = false;
    uint32_t waiting[kMostThreads / kLanes] = {};
};

struct Warp {
    Meeting meeting;
    Together together = nullptr;
    uint32_t ready = 0, waiting = 0;
    int arrived = 0;
};

struct Block {
    Fiber fibers[kMostThreads];
    Warp warps[kMostThreads / kLanes];
    Barrier barriers[16];
    void* scheduler = nullptr;
    char* shared = nullptr;  // what shared addresses count from
    const std::function<void()>* kernel = nullptr;
    int alive = 0;
    std::minstd_rand random;
};

thread_local Block* block = nullptr;

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "emulation: block (%u, %u, %u), thread %d: %s\n", block_index.x, block_index.y, block_index.z, current, what);
    abort();
}

Fiber& self() { return block->fibers[current]; }
Warp& own_warp() { return block->warps[current / kLanes]; }

void pause() {
    const int me = current;
    emulation_switch(&block->fibers[me].at, block->scheduler);
    current = me;
}

void open(Barrier& barrier) {
    for (int w = 0; w < kMostThreads / kLanes; ++w) {
        block->warps[w].ready |= barrier.waiting[w];
        barrier.waiting[w] = 0;
    }
    barrier.result = barrier.any;
    barrier.any = false;
    barrier.arrived = barrier.wanted = 0;
}

void open(Warp& warp) {
    warp.together(warp.meeting);
    warp.ready |= warp.waiting;
    warp.waiting = 0;
    warp.arrived = 0;
    warp.together = nullptr;
}

void run() {
    (*block->kernel)();
    --block->alive;
    Warp& warp = own_warp();
    warp.meeting.present &= ~(1u << current % kLanes);
    // those who wait for all wait for one less
    if (warp.arrived && warp.arrived == __builtin_popcount(warp.meeting.present)) open(warp);
    Barrier& all = block->barriers[0];
    if (all.arrived && all.wanted == 0 && all.arrived == block->alive) open(all);
    for (;;) pause();
}

void start(Fiber& fiber) {
    if (!fiber.stack) {
        fiber.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (fiber.stack == MAP_FAILED) fail("no memory for a stack");
    }
    void** top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + kStack) - 3;  // aligned as a call leaves it
    *top = nullptr;  // nobody returns from run()
    *--top = reinterpret_cast<void*>(run);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.at = top;
    fiber.groups.assign(1, {});
}

const char* run_block(Block& b, int threads, char* shared, size_t shared_bytes) {
    if (shared) memset(shared, kUnset, kSharedBuffer);
    b.alive = threads;
    for (Barrier& barrier : b.barriers) barrier = {};
    const int warps = (threads + kLanes - 1) / kLanes;
    for (int w = 0; w < warps; ++w) {
        const int lanes = threads - w * kLanes < kLanes ? threads - w * kLanes : kLanes;
        b.warps[w] = {};
        b.warps[w].ready = b.warps[w].meeting.present = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    }
    for (int t = 0; t < threads; ++t) start(b.fibers[t]);
    while (b.alive) {
        int w = b.random() % warps, tried = 0;
        while (tried < warps && !b.warps[w].ready) {
            w = (w + 1) % warps;
            ++tried;
        }
        if (tried == warps) return "every thread waits";
        uint32_t turn = b.warps[w].ready;
        while (turn) {
            const int lane = __builtin_ctz(turn);
            turn &= turn - 1;
            b.warps[w].ready &= ~(1u << lane);
            current = w * kLanes + lane;
            emulation_switch(&b.scheduler, b.fibers[current].at);
        }
    }
    for (size_t at = shared_bytes; shared && at < kSharedBuffer; ++at)
        if (static_cast<unsigned char>(shared[at]) != kUnset) return "shared memory was written beyond the block's";
    return nullptr;
}

}  // namespace

thread_local Dim3 block_index, grid_size, block_size;
thread_local int current;

Meeting& meeting() { return own_warp().meeting; }

void meet_lanes(Together together) {
    Warp& warp = own_warp();
    if (warp.arrived && warp.together != together) fail("lanes of a warp meet in different operations");
    warp.together = together;
    if (++warp.arrived == __builtin_popcount(warp.meeting.present)) return open(warp);
    warp.waiting |= 1u << current % kLanes;
    pause();
}

void meet_threads(int number, int threads) {
    Barrier& barrier = block->barriers[number];
    if (barrier.arrived && barrier.wanted != threads) fail("threads meet at a barrier in different numbers");
    barrier.wanted = threads;
    if (++barrier.arrived == (threads ? threads : block->alive)) return open(barrier);
    barrier.waiting[current / kLanes] |= 1u << current % kLanes;
    pause();
}

bool any_thread(bool value) {
    Barrier& barrier = block->barriers[0];
    barrier.any |= value;
    meet_threads(0, 0);
    const bool result = barrier.result;
    meet_threads(0, 0);  // or the next one's result would be read
    return result;
}

void copy_later(char* to, const void* from, bool valid) {
    const Copy copy{to, from, valid};
    if (block->random() & 64) copy.land();
    else self().groups.back().push_back(copy);
}

void close_copies() { self().groups.emplace_back(); }

void wait_for_copies(int groups_left) {
    auto& groups = self().groups;
    const int landing = static_cast<int>(groups.size()) - 1 - groups_left;
    for (int g = 0; g < landing; ++g)
        for (const Copy& copy : groups[g]) copy.land();
    if (landing > 0) groups.erase(groups.begin(), groups.begin() + landing);
}

const char* run_grid(Dim3 grid, Dim3 size, char* shared, size_t shared_bytes, const std::function<void()>& kernel) {
    const size_t threads = static_cast<size_t>(size.x) * size.y * size.z;
    if (threads == 0 || threads > kMostThreads || size.y != 1 || size.z != 1) return "blocks of 1 to 1,024 threads in one dimension";
    if (shared_bytes > (shared ? kMostShared : 0)) return "more shared memory than a block has";
    if (!block) {
        block = new Block;
        block->random.seed(20261201);
    }
    block->kernel = &kernel;
    block->shared = shared ? shared : reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(&current) & ~uintptr_t{1023});
    grid_size = grid;
    block_size = size;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                block_index = {x, y, z};
                if (const char* wrong = run_block(*block, static_cast<int>(threads), shared, shared_bytes)) return wrong;
            }
    return nullptr;
}

// 2^30 is where the buffer starts; arrays of a fixed size lie elsewhere in this CPU thread's memory.
uint32_t shared_address_of(const void* p) { return static_cast<uint32_t>(static_cast<const char*>(p) - block->shared) + (1u << 30); }
char* shared_at(uint32_t address) { return block->shared + static_cast<int32_t>(address - (1u << 30)); }

}  // namespace emulation
