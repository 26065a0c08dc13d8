// Plans by threads of the host, from the source that a CTA runs: standard input names trees, a line each ("nodes parents.."), the plans' words
// go to standard output, a line each, with as many words of room behind them as are asked for. Arguments: threads of a team, words of room.
#include <barrier>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <vector>

#include "plan.cuh"

namespace {

struct Team {
    int thread, threads;
    std::barrier<>& all;

    int id() const { return thread; }
    int size() const { return threads; }
    void sync() const { all.arrive_and_wait(); }
    void add(int* to, int n) const { __atomic_fetch_add(to, n, __ATOMIC_RELAXED); }
    void set(uint32_t* to, uint32_t bits) const { __atomic_fetch_or(to, bits, __ATOMIC_RELAXED); }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const int threads = std::atoi(arguments[1]), room = std::atoi(arguments[2]);
    std::barrier<> all(threads);
    for (int nodes; std::cin >> nodes;) {
        static canopy::Paths tree;
        static canopy::Numbers numbers;
        for (int i = 0; i < nodes; ++i) {
            int parent;
            std::cin >> parent;
            tree.parent[i] = parent < 0 ? 0 : (uint8_t)parent;
            tree.depth[i] = parent < 0 ? 0 : (uint8_t)(tree.depth[parent] + 1);
        }
        std::vector<uint32_t> words(room, ~0u);
        const auto work = [&](int thread) {
            const Team team{thread, threads, all};
            canopy::find_paths(team, tree, nodes);
            canopy::write_plan(team, tree, numbers, nodes, 0, words.data(), room);
        };
        std::vector<std::thread> others;
        for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
        work(0);
        for (std::thread& other : others) other.join();
        for (uint32_t word : words) std::cout << word << ' ';
        std::cout << '\n';
    }
}
