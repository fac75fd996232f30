// Runs kernels of compressing.cu on a CPU, with a real thread for each thread of a block, so that they can meet.
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static std::barrier<> *meeting;
static void __syncthreads() { meeting->arrive_and_wait(); }
template <typename T> static T atomicAdd(T *place, T value) { return __sync_fetch_and_add(place, value); }
static unsigned int __float_as_uint(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

template <typename Kernel> static void run(int blocks, Kernel kernel) {
    std::barrier<> barrier(256);
    meeting = &barrier;
    std::vector<std::thread> threads;
    for (int number = 0; number < 256; number++)
        threads.emplace_back([=] {
            threadIdx.x = number;
            for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
                kernel();
                __syncthreads();
            }
        });
    for (auto &thread : threads) thread.join();
}
