/* The library itself: errors, which kernels this processor gets, the read bandwidth, and the profile.
 *
 * Notable here:
 * - this file and all others but kernels.cpp are compiled for any processor of the architecture: they run before one
 *   knows which it is
 */
#include "library.h"

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "threads.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace pippin {
namespace {

thread_local char message[512] = "";

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

/* The variants that were compiled in and that this processor has the instructions for, best first. */
std::vector<const KernelTable *> find_tables() {
    std::vector<const KernelTable *> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
#ifdef PIPPIN_HAVE_AVX512BF16
    if (has_avx512vnni() && __builtin_cpu_supports("avx512bf16")) found.push_back(kernels_avx512bf16());
#endif
#ifdef PIPPIN_HAVE_AVX512VNNI
    if (has_avx512vnni()) found.push_back(kernels_avx512vnni());
#endif
#ifdef PIPPIN_HAVE_AVX2
    if (has_avx2()) found.push_back(kernels_avx2());
#endif
#endif
#ifdef PIPPIN_HAVE_NEON
#if defined(__aarch64__) && defined(__linux__)
    const unsigned long has = getauxval(AT_HWCAP), needs = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    if ((has & needs) == needs) found.push_back(kernels_neon());
#else
    found.push_back(kernels_neon()); // every machine with this system has them
#endif
#endif
    found.push_back(kernels_generic());
    return found;
}

// Made when the library is loaded: a copy of the process from while a thread makes them would wait for it forever.
const std::vector<const KernelTable *> tables = find_tables();

std::string names_of(const std::vector<const KernelTable *> &found) {
    std::string all;
    for (const KernelTable *table : found) all += (all.empty() ? "" : ",") + std::string(table->name);
    return all;
}
const std::string names = names_of(tables);

std::atomic<const KernelTable *> chosen{tables.front()};
std::atomic<int64_t> spent[4];

} // namespace

const KernelTable &kernels() { return *chosen.load(std::memory_order_acquire); }

int fail(int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

void profile_add(const int64_t nanoseconds[4]) {
    for (int part = 0; part < 4; ++part) spent[part].fetch_add(nanoseconds[part], std::memory_order_relaxed);
}

} // namespace pippin

using namespace pippin;

extern "C" int pippin_abi(void) { return PIPPIN_ABI; }

extern "C" const char *pippin_error(void) { return message; }

extern "C" const char *pippin_instruction_set(void) { return kernels().name; }

extern "C" const char *pippin_instruction_sets(void) { return names.c_str(); }

extern "C" int pippin_use_instruction_set(const char *name) {
    for (const KernelTable *table : tables)
        if (name && strcmp(table->name, name) == 0) {
            chosen.store(table, std::memory_order_release);
            return PIPPIN_OK;
        }
    return fail(PIPPIN_BAD_ARGUMENT, "no kernels for the instruction set '%s' here: there are %s", name ? name : "",
                pippin_instruction_sets());
}

extern "C" int pippin_set_threads(int count, int pin) {
    const int status = set_thread_count(count, pin != 0);
    if (status == PIPPIN_BAD_ARGUMENT)
        return fail(status, "the number of threads must be from 1 to %d, not %d", MOST_THREADS, count);
    if (status != PIPPIN_OK) return fail(status, "the system has not enough threads for %d", count);
    return status;
}

extern "C" int pippin_threads(void) { return thread_count(); }

extern "C" double pippin_read_bandwidth(int64_t bytes, int threads, int repeats) {
    if (bytes < 4096 || threads < 1 || threads > MOST_THREADS || repeats < 1) {
        fail(PIPPIN_BAD_ARGUMENT, "bandwidth needs at least 4096 bytes, 1 to %d threads and 1 repeat", MOST_THREADS);
        return PIPPIN_BAD_ARGUMENT;
    }
    bytes = bytes / 4096 * 4096;
    auto *data = static_cast<float *>(aligned_alloc(4096, static_cast<size_t>(bytes)));
    if (!data) {
        fail(PIPPIN_NO_MEMORY, "no memory for a buffer of %lld bytes", static_cast<long long>(bytes));
        return PIPPIN_NO_MEMORY;
    }
    const int before = thread_count();
    const bool pinned = threads_pinned();
    const int status = pippin_set_threads(threads, pinned);
    memset(data, 1, static_cast<size_t>(bytes)); // every page gets memory of its own
    const int64_t words = bytes / 4, chunk = 1 << 15;
    double best = 0;
    std::atomic<float> sink{0};
    for (int repeat = 0; status == PIPPIN_OK && repeat < repeats; ++repeat) {
        expect_regions();
        const auto begin = std::chrono::steady_clock::now();
        parallel(words, chunk, [&](int64_t from, int64_t to, int) {
            sink.store(kernels().step.read(data + from, to - from), std::memory_order_relaxed);
        });
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        const double rate = static_cast<double>(bytes) / taken.count();
        best = rate > best ? rate : best;
    }
    free(data);
    set_thread_count(before, pinned);
    return status == PIPPIN_OK ? best : status;
}

extern "C" void pippin_profile(double seconds[4]) {
    for (int part = 0; part < 4; ++part)
        seconds[part] = static_cast<double>(spent[part].load(std::memory_order_relaxed)) * 1e-9;
}
