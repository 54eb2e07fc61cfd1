// Runs csrc/kernels/attention/sm90/balance.cuh on the host: 32 lanes are contexts that take turns
// at each reduction of the warp. Compares with tiles given one by one to the block with the least
// work.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace {

struct Lane {
  unsigned x = 0;  // threadIdx.x
  unsigned sent[2];
  int sends = 0;
  bool ended = false;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

Lane lanes[32], *lane;
ucontext_t scheduler;

// All lanes' values, when all have one.
template <class Combine>
unsigned reduce(unsigned value, Combine&& combine) {
  const int slot = lane->sends++ % 2;
  lane->sent[slot] = value;
  swapcontext(&lane->context, &scheduler);
  unsigned result = lanes[0].sent[slot];
  for (int i = 1; i < 32; ++i) result = combine(result, lanes[i].sent[slot]);
  return result;
}

}  // namespace

#define threadIdx (*lane)
using std::min;
unsigned __reduce_min_sync(unsigned, unsigned value) {
  return reduce(value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
unsigned __reduce_add_sync(unsigned, unsigned value) {
  return reduce(value, [](unsigned a, unsigned b) { return a + b; });
}
// Used by what this program does not call.
unsigned long __cvta_generic_to_shared(const void*);
float __uint_as_float(unsigned);

#include "kernels/attention/sm90/balance.cuh"

namespace {

using torch_cubin::sm90::BlockLoads;

struct Case {
  int blocks, heads, tiles, most;  // `most`: blocks of keys of a tile; tile t has up to t + 1
};

unsigned cost(const Case& c, int tile) {
  return (4 * std::min(c.most, tile + 1) + 3) * BlockLoads::kUnit;
}

// The block of each tile: the last tile of every head, then the one before it.
std::vector<int> one_by_one(const Case& c) {
  std::vector<unsigned> loads;
  std::vector<int> found;
  for (int index = 0; index < c.heads * c.tiles; ++index) {
    if (index < c.blocks) loads.push_back(index);
    const int block =
        index < c.blocks ? index : std::min_element(loads.begin(), loads.end()) - loads.begin();
    loads[block] += cost(c, c.tiles - 1 - index / c.heads);
    found.push_back(block);
  }
  return found;
}

Case now;
int own_block;
std::vector<int> own_tiles;

void run_lane() {
  BlockLoads loads;
  const auto cost_of = [](int index) { return cost(now, now.tiles - 1 - index / now.heads); };
  loads.start(now.blocks, own_block, cost_of);
  if (threadIdx.x == 0) own_tiles = {own_block};
  for (int index = now.blocks; index < now.heads * now.tiles;) {
    int mine, count = loads.give(now.heads - index % now.heads, cost_of(index), mine);
    if (mine >= 0 && threadIdx.x == 0) own_tiles.push_back(index + mine);
    index += count;
  }
  lane->ended = true;
  swapcontext(&lane->context, &scheduler);
}

void run_warp() {
  for (int i = 0; i < 32; ++i) {
    lanes[i].x = i;
    lanes[i].ended = false;
    lanes[i].sends = 0;
    if (!lanes[i].stack) lanes[i].stack.reset(new char[1 << 16]);
    getcontext(&lanes[i].context);
    lanes[i].context.uc_stack.ss_sp = lanes[i].stack.get();
    lanes[i].context.uc_stack.ss_size = 1 << 16;
    lanes[i].context.uc_link = nullptr;
    makecontext(&lanes[i].context, run_lane, 0);
  }
  while (!lanes[0].ended) {
    for (Lane& each : lanes) {
      lane = &each;
      swapcontext(&scheduler, &lane->context);
    }
  }
}

}  // namespace

// Words: blocks, heads, tiles, most; then the blocks to compare. Prints how many tiles they have.
int main(int, char** words) {
  now = {std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]), std::atoi(words[4])};
  const std::vector<int> expected = one_by_one(now);
  int tiles = 0;
  for (char** word = words + 5; *word != nullptr; ++word) {
    own_block = std::atoi(*word);
    run_warp();
    std::vector<int> wanted;
    for (int index = 0; index < static_cast<int>(expected.size()); ++index) {
      if (expected[index] == own_block) wanted.push_back(index);
    }
    if (own_tiles != wanted) {
      std::printf("block %d has other tiles\n", own_block);
      return 1;
    }
    tiles += own_tiles.size();
  }
  std::printf("%d\n", tiles);
}
