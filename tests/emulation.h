// CUDA on a CPU, for tests: a block is a group of threads with a barrier, blocks come one after the other.
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

using std::fabs; using std::fmax; using std::fmin; using std::sqrt;
struct Index { unsigned x; };
static thread_local Index threadIdx;
static Index blockIdx, blockDim, gridDim;
static char* emulated_memory;
static std::barrier<>* emulated_barrier;
static void __syncthreads() { emulated_barrier->arrive_and_wait(); }
static void __syncwarp() {}  // a warp is one thread
static struct { std::mutex mutex; std::condition_variable changed; int waiting, turn; } emulated_named[16];
static void emulated_wait(int name, int threads) {
  auto& barrier = emulated_named[name];
  std::unique_lock lock(barrier.mutex);
  int turn = barrier.turn;
  if (++barrier.waiting == threads) barrier.waiting = 0, barrier.turn++, barrier.changed.notify_all();
  else barrier.changed.wait(lock, [&] { return barrier.turn != turn; });
}
#define NAMED_BARRIER(name, threads) emulated_wait(name, threads)
static void atomicOr(unsigned* at, unsigned bits) { __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

#define __device__
#define __global__
#define __noinline__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) real* name = (real*)emulated_memory
#include SOURCE

template <typename... A, std::size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(A*)arguments[I]...);
}

// 0; 1 if a block wrote beyond its shared memory, which begins as not-a-numbers; 2 if there is no such kernel
template <typename... A>
static int run(void (*kernel)(A...), int blocks, int threads, int shared, void** arguments) {
  const int guard = 256;
  blockDim.x = threads; gridDim.x = blocks;
  for (int b = 0; b < blocks; b++) {
    std::vector<char> memory(shared + guard, (char)0xff);
    std::barrier<> barrier(threads);
    emulated_memory = memory.data(); emulated_barrier = &barrier; blockIdx.x = b;
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; t++)
      workers.emplace_back([=] { threadIdx.x = t; call(kernel, arguments, std::index_sequence_for<A...>{}); });
    for (auto& worker : workers) worker.join();
    for (int i = 0; i < guard; i++) if (memory[shared + i] != (char)0xff) return 1;
  }
  return 0;
}

#define ENTRY(kernel) if (std::strcmp(name, #kernel) == 0) return run(kernel, blocks, threads, shared, arguments);
extern "C" int launch(const char* name, int blocks, int threads, int shared, void** arguments) {
  ENTRIES
  return 2;
}
