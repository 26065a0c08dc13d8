// The kernels of every source that is compiled in, by name.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

#include "threads.h"

namespace emulation {

struct Kernel {
    const char* name;
    void (*call)(void** params);
    char* (*shared)();  // what its source declares as `extern __shared__`, of this CPU thread; null without
    int* (*fault)();    // its source's own copy of the planted fault, of this CPU thread; null without
    const Kernel* next;
};

// The first of them.
const Kernel*& kernels();

template <auto Function>
struct Entry;

template <typename... Params, void (*Function)(Params...)>
struct Entry<Function> {
    template <std::size_t... I>
    static void unpacked(void** params, std::index_sequence<I...>) {
        Function(*static_cast<std::remove_const_t<Params>*>(params[I])...);
    }
    static void call(void** params) { unpacked(params, std::index_sequence_for<Params...>()); }
};

struct Listed {
    explicit Listed(Kernel& kernel) {
        kernel.next = kernels();
        kernels() = &kernel;
    }
};

}  // namespace emulation

// Shared memory whose size comes with the launch.
#define CANOPY_SHARED(type, name)                                                          \
    alignas(1024) thread_local type name[emulation::kSharedBuffer / sizeof(type)];         \
    static char* shared_of_block() { return reinterpret_cast<char*>(name); }

#define CANOPY_PLANTED(fault) \
    static int* fault##_of_thread() { return &fault; }

#define CANOPY_LISTED(name, shared, fault)                                                                \
    static emulation::Kernel listed_##name{#name, emulation::Entry<&name>::call, shared, fault, nullptr}; \
    static const emulation::Listed first_##name{listed_##name};
