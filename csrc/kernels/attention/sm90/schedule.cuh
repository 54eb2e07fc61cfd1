// The tiles of attention's output that a block computes, and the keys that each of them needs.
#pragma once

#include <type_traits>

#include "balance.cuh"
#include "batch_order.cuh"
#include "sequence.cuh"

namespace torch_cubin {
namespace sm90 {

// A block's tile, which the scheduling warp passes to the others through shared memory.
struct AttentionTile {
  int row;  // the block's first, of its sequence
  int head, kv_head;
  int batch;       // or the number of a packed sequence
  int last_block;  // blocks of keys are processed from here down
  int blocks;      // at least 1; 0: no more tiles
  Sm90Sequence sequence;
};

// A tile in kernels that read a mask.
struct MaskedTile : AttentionTile {
  u32 classes;  // the word of Sm90MaskClass that contains `last_block`
};

template <bool kMasked>
using TileOf = std::conditional_t<kMasked, MaskedTile, AttentionTile>;

// A tile in kernels whose warpgroups skip blocks of keys at both ends of those of the tile.
template <int kGroups>
struct GroupedTile : MaskedTile {
  const u32* words;    // the mask's bits, of the tile's first row
  int2 seen[kGroups];  // the last and the first block that a warpgroup computes
  u32 first;           // the flags of `last_block`
};

// A word of Sm90MaskClass without a mask.
constexpr u32 kAllHideNone = kMaskHidesNone * 0x55555555u;

// The blocks of a word, as bits of visible_blocks(), up to `block`, and from `block` on.
TC_DEVICE u32 blocks_up_to(int block) { return ~0u >> (30 - block % kMaskWordBlocks * 2); }
TC_DEVICE u32 blocks_from(int block) { return ~0u << block % kMaskWordBlocks * 2; }

// The classes of a mask for one tile of queries; null without a mask.
template <int kRows>
TC_DEVICE const u32* mask_classes(const Sm90AttentionParams& p, const AttentionTile& tile) {
  if (p.mask.classes == nullptr) return nullptr;
  return p.mask.classes + tile.batch * p.mask.class_stride[0] + tile.head * p.mask.class_stride[1] +
         tile.row / kRows * p.mask.class_stride[2];
}

// The keys that any of rows `row` to `row + rows - 1` attends to, in blocks of kTileN. Rows that
// attend to none get one block, in which the mask then hides everything.
template <int kTileN>
TC_DEVICE void key_blocks(const Sm90Sequence& s, int row, int rows, int& last_block, int& blocks) {
  int last_row = min(row + rows, s.rows) - 1;
  int last = min(s.columns - 1, last_row + s.last);
  int first = max(0, row + s.first);
  last_block = last < first ? 0 : last / kTileN;
  blocks = last < first ? 1 : last_block - first / kTileN + 1;
}

// The blocks of keys of a tile of kRows, from the last one down, without those that a mask hides
// entirely.
template <int kRows, bool kMasked>
class KeyBlocks {
 public:
  int block;

  KeyBlocks() = default;
  TC_DEVICE KeyBlocks(const Sm90AttentionParams& p, const TileOf<kMasked>& tile)
      : block(tile.last_block), last_(tile.last_block - tile.blocks + 1) {
    if constexpr (kMasked) {
      classes_ = mask_classes<kRows>(p, tile);
      word_ = tile.classes;
    }
  }

  TC_DEVICE bool is_last() const { return block == last_; }
  TC_DEVICE int last() const { return last_; }  // in order of visits

  // Skips the first and the last blocks in order of visits: 0 or 1 each.
  TC_DEVICE void skip(int first, int last) {
    block -= first;
    last_ += last;
  }

  // Whether a mask hides keys of the block, or adds to their logits. If no block has a visible key,
  // the single block of the tile has the class that hides all.
  TC_DEVICE bool is_masked() const {
    return kMasked && classes_ != nullptr &&
           (word_ >> block % kMaskWordBlocks * 2 & 3) != kMaskHidesNone;
  }

  // Must not be called on the last one.
  TC_DEVICE void next() {
    --block;
    if constexpr (kMasked) {
      if (classes_ != nullptr) find();
    }
  }

  // Goes down to a block that is not entirely hidden, which exists.
  TC_DEVICE void find() {
    if (block % kMaskWordBlocks == kMaskWordBlocks - 1) {
      word_ = __ldg(classes_ + block / kMaskWordBlocks);
    }
#pragma unroll 1
    for (;;) {
      u32 seen = visible_blocks(word_) & blocks_up_to(block);
      if (seen != 0) {
        block = block / kMaskWordBlocks * kMaskWordBlocks + (31 - __clz(seen)) / 2;
        return;
      }
      block = block / kMaskWordBlocks * kMaskWordBlocks - 1;
      word_ = __ldg(classes_ + block / kMaskWordBlocks);
    }
  }

 private:
  int last_;
  const u32* classes_;
  u32 word_;
};

// A flag of a block of keys in the words of ReceivedKeyBlocks.
constexpr u32 kLastBlock = 1u << 31;

// For kernels that send no blocks.
struct NoMask {
  template <class Params, class Tile>
  TC_DEVICE NoMask(const Params&, const Tile&) {}
};

// Whether a mask hides something of a block from a tile, or adds to its logits.
struct TileMask {
  static constexpr u32 kMaskedBlock = 1u << 30, kBlockNumber = kMaskedBlock - 1;

  TC_DEVICE TileMask(const Sm90AttentionParams&, const MaskedTile&) {}

  template <int kRows>
  TC_DEVICE u32 flags(const KeyBlocks<kRows, true>& blocks) const {
    return blocks.is_masked() ? kMaskedBlock : 0;
  }
};

// For each warpgroup of 64 queries: whether a boolean mask hides something of a block from it, and
// whether the block is its last one. The lines of the warpgroups' classes follow that of their
// tile.
template <int kGroups, int kTileN>
class GroupMask {
 public:
  static constexpr u32 kMaskedBlock = 1u << 28, kGroupsLast = 1u << 25;  // of the first warpgroup
  static constexpr u32 kBlockNumber = kGroupsLast - 1;

  TC_DEVICE GroupMask(const Sm90AttentionParams& p, const GroupedTile<kGroups>& tile)
      : tile_(tile),
        lines_(mask_classes<64 * kGroups>(p, tile)),
        words_(mask_class_words<kTileN>(p.lengths)) {}

  TC_DEVICE u32 flags(const KeyBlocks<64 * kGroups, true>& blocks) {
    u32 flags = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (blocks.block == tile_.seen[g].y) flags |= kGroupsLast << g;
    }
    if (lines_ == nullptr) return flags;
    int word = blocks.block / kMaskWordBlocks;
    if (word != word_) {
      word_ = word;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) classes_[g] = load(g, word);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      u32 of_block = classes_[g] >> blocks.block % kMaskWordBlocks * 2 & 3;
      if (of_block != kMaskHidesNone) flags |= kMaskedBlock << g;
    }
    return flags;
  }

  // The last and the first block, of those of the tile, of which a warpgroup sees something: of the
  // band, and of what the mask leaves of it. The tile's last one if there is none.
  TC_DEVICE int2 seen(int group) const {
    int last, blocks, row = tile_.row + 64 * group;
    key_blocks<kTileN>(tile_.sequence, row, 64, last, blocks);
    int first = max(last - blocks, tile_.last_block - tile_.blocks) + 1;
    last = min(last, tile_.last_block);
    int2 none = make_int2(tile_.last_block, tile_.last_block);
    if (last < first || row >= tile_.sequence.rows) return none;
    if (lines_ == nullptr) return make_int2(last, first);
    int most = -1, least = 0;
#pragma unroll 1
    for (int word = last / kMaskWordBlocks; word >= first / kMaskWordBlocks; --word) {
      u32 seen = visible_blocks(load(group, word));
      if (word == last / kMaskWordBlocks) seen &= blocks_up_to(last);
      if (word == first / kMaskWordBlocks) seen &= blocks_from(first);
      if (seen == 0) continue;
      if (most < 0) most = word * kMaskWordBlocks + (31 - __clz(seen)) / 2;
      least = word * kMaskWordBlocks + (__ffs(seen) - 1) / 2;
    }
    return most < 0 ? none : make_int2(most, least);
  }

 private:
  TC_DEVICE u32 load(int group, int word) const {
    return __ldg(lines_ + (group + 1) * words_ + word);
  }

  const GroupedTile<kGroups>& tile_;
  const u32* lines_;
  int words_;
  int word_ = -1;  // that flags() has read last, and what it says of each warpgroup
  u32 classes_[kGroups];
};

// A tile's blocks of keys in consumers of `masked` and `added` kernels: the first one comes from
// the tile, each other one with the previous block from the thread that loads the keys, which has
// the time to find it. Mask: TileMask or GroupMask.
template <class Mask>
class ReceivedKeyBlocks {
 public:
  int block;

  ReceivedKeyBlocks() = default;
  TC_DEVICE ReceivedKeyBlocks(const Sm90AttentionParams&, const MaskedTile& tile)
      : block(tile.last_block), received_(tile.blocks == 1 ? kLastBlock : 0) {
    if ((tile.classes >> block % kMaskWordBlocks * 2 & 3) != kMaskHidesNone) {
      received_ |= Mask::kMaskedBlock;
    }
  }
  template <int kGroups>
  TC_DEVICE ReceivedKeyBlocks(const Sm90AttentionParams&, const GroupedTile<kGroups>& tile)
      : block(tile.last_block), received_(tile.first | (tile.blocks == 1 ? kLastBlock : 0)) {}

  TC_DEVICE bool is_last() const { return (received_ & kLastBlock) != 0; }
  TC_DEVICE bool is_masked(int group = 0) const {
    return (received_ & Mask::kMaskedBlock << group) != 0;
  }
  TC_DEVICE bool is_groups_last(int group) const {
    return (received_ & Mask::kGroupsLast << group) != 0;
  }

  TC_DEVICE void next(u32 received) {
    received_ = received;
    block = static_cast<int>(received & Mask::kBlockNumber);
  }

  // The argument of next() after the block of `blocks`; meaningless after the last one.
  template <int kRows>
  static TC_DEVICE u32 describe_next(KeyBlocks<kRows, true> blocks, Mask& mask) {
    if (blocks.is_last()) return 0;
    blocks.next();
    return static_cast<u32>(blocks.block) | (blocks.is_last() ? kLastBlock : 0) |
           mask.flags(blocks);
  }

 private:
  u32 received_;
};

// A tile of the schedule: its index among those of its sequence's queries.
struct TilePlace {
  int query, head, batch;
};

// Removes entirely hidden blocks of keys before the first visible one and after the last; keeps one
// of them if none is visible.
TC_DEVICE void trim(MaskedTile& tile, const u32* classes) {
  int first = tile.last_block - tile.blocks + 1, last = -1, least = 0;
  tile.classes = 0;
#pragma unroll 1
  for (int word = tile.last_block / kMaskWordBlocks; word >= first / kMaskWordBlocks; --word) {
    u32 all = __ldg(classes + word), seen = visible_blocks(all);
    if (word == tile.last_block / kMaskWordBlocks) seen &= blocks_up_to(tile.last_block);
    if (word == first / kMaskWordBlocks) seen &= blocks_from(first);
    if (seen == 0) continue;
    if (last < 0) {
      last = word * kMaskWordBlocks + (31 - __clz(seen)) / 2;
      tile.classes = all;
    }
    least = word * kMaskWordBlocks + (__ffs(seen) - 1) / 2;
  }
  tile.blocks = last < 0 ? 1 : last - least + 1;
  if (last >= 0) tile.last_block = last;
}

template <int kRows, int kTileN, bool kMasked>
TC_DEVICE void describe(TileOf<kMasked>& tile, const Sm90AttentionParams& p,
                        const TilePlace& place) {
  tile.row = place.query * kRows - p.fewer;
  if (kMasked || p.lengths.cu_seqlens_q != nullptr) {
    wait_for_previous_grid();
    tile.sequence = Sm90Sequence(p.lengths, place.batch);
  } else {
    tile.sequence = Sm90Sequence::of_equals(p.lengths, place.batch);
  }
  int missing = min(tile.row, 0);  // of the first tile's queries
  tile.row -= missing;
  if (missing < 0) tile.sequence.rows = kRows + missing;
  key_blocks<kTileN>(tile.sequence, tile.row, kRows, tile.last_block, tile.blocks);
  tile.batch = place.batch;
  tile.head = place.head;
  tile.kv_head = place.head / p.group;
  if constexpr (kMasked) {
    if (p.mask.classes != nullptr) {
      trim(tile, mask_classes<kRows>(p, tile));
    } else {
      tile.classes = kAllHideNone;
    }
  }
}

// Run by one whole warp. Every block, or team of a block (sm90/forward_block.cuh), computes the
// same list, and takes its own part of it. For packed sequences sm90/order.cu has written the list,
// and each block takes the next tile when it needs one, as it does after a kernel that can set
// `next` to 0 (kTakesNext).
// With kOrders batches are sorted (batch_order.cuh).
// With kRotates equal tiles go round from block to block with each round, so that all blocks get as
// many of the partial ones at the ends of heads: of 132 blocks and 6 tiles a head, some got no
// others.
template <int kRows, int kTileN, bool kTakesNext, int kTeams = 1, bool kRotates = false,
          bool kOrders = false>
class AttentionSchedule {
 public:
  // Reads no global memory.
  TC_DEVICE AttentionSchedule(const Sm90AttentionParams& p, int team = 0)
      : p_(p), block_(blockIdx.x + team * gridDim.x), blocks_(gridDim.x * kTeams) {
    total_ = p.batch * p.heads * p.tiles;
    next_ = block_;
    if (p.schedule <= 0 || takes_next()) return;
    loads_.start(blocks_, block_, [&](int block) { return cost(locate(block).query); });
    place_ = locate(blocks_);
    step_ = cost(place_.query);
  }

  // False after the last one.
  TC_DEVICE bool next(TilePlace& tile) {
    if (p_.order != nullptr) return take(tile);
    if (takes_next()) {
      int number = take_number(p_.next);
      if (number >= total_) return false;
      Place place = locate(number);
      set(tile, place.query, place.first_head + place.head);
      if constexpr (kOrders) tile.batch = order_.in_place<kTileN>(p_, blocks_, tile.batch);
      return true;
    }
    if (p_.schedule == kRoundRobin) {
      int number = next_;
      if (kRotates && p_.tiles < blocks_) {
        int round = next_ / blocks_, step = p_.tiles + 1 - blocks_ % p_.tiles;
        number = round * blocks_ + (block_ + round % p_.tiles * step) % blocks_;
      }
      if (number >= total_) return false;
      int head = number / p_.tiles;
      set(tile, p_.tiles - 1 - (number - head * p_.tiles), head);
      next_ += blocks_;
      return true;
    }
    if (p_.schedule == kInPairs) {
      if (second_ >= 0) {
        set(tile, second_, first_head_);
        second_ = -1;
        return true;
      }
      int pairs = (p_.tiles + 1) / 2, head = next_ / pairs;
      if (head >= p_.batch * p_.heads) return false;
      // Shifted from round to round: an unpaired middle tile is half a pair.
      int place = (next_ - head * pairs + head * pairs / blocks_) % pairs;
      set(tile, p_.tiles - 1 - place, head);
      if (place != p_.tiles - 1 - place) second_ = place;
      first_head_ = head;
      next_ += blocks_;
      return true;
    }
    if (next_ >= total_) return false;
    if (p_.schedule == kByQueries) {
      int heads = p_.batch * p_.heads, row = next_ / heads;
      set(tile, p_.tiles - 1 - row, next_ - row * heads);
      next_ += 2 * (blocks_ - next_ % blocks_) - 1;
      return true;
    }
    if (next_ < blocks_) {  // the first tiles are assigned in order
      Place place = locate(next_);
      next_ = blocks_;
      set(tile, place.query, place.first_head + place.head);
      return true;
    }
    return assign(tile);
  }

 private:
  // A block of keys costs 4 units of work and a tile 3 more.
  static constexpr unsigned kBlockCost = 4 * BlockLoads::kUnit, kTileCost = 3 * BlockLoads::kUnit;

  // In schedule order: heads in groups of `schedule`, in a group the last queries first.
  struct Place {
    int first_head, heads;  // of the group
    int head, query;
  };

  TC_DEVICE Place locate(int index) const {
    Place place;
    int in_group = p_.schedule * p_.tiles, group = index / in_group;
    index -= group * in_group;
    place.first_head = group * p_.schedule;
    place.heads = max(1, min(p_.schedule, p_.batch * p_.heads - place.first_head));
    place.query = p_.tiles - 1 - index / place.heads;
    place.head = index % place.heads;
    return place;
  }

  TC_DEVICE unsigned cost(int query) const {
    int last_block, blocks;
    Sm90Sequence sequence = Sm90Sequence::of_equals(p_.lengths, 0);
    key_blocks<kTileN>(sequence, query * kRows - p_.fewer, kRows, last_block, blocks);
    return blocks * kBlockCost + kTileCost;
  }

  TC_DEVICE void set(TilePlace& tile, int query, int head_of_all) {
    int batch = head_of_all / p_.heads;
    tile = {query, head_of_all - batch * p_.heads, batch};
  }

  TC_DEVICE bool takes_next() const { return kTakesNext && p_.next != nullptr; }

  static TC_DEVICE int take_number(int* next) {
    wait_for_previous_grid();
    int number = 0;
    if (threadIdx.x % 32 == 0) number = atomicAdd(next, 1);
    return __shfl_sync(~0u, number, 0);
  }

  // All places of some heads, then of the next ones, so that their data stay in the L2 cache. The
  // last heads' places are ordered together: their longest tiles come first, and the shortest end
  // the kernel.
  TC_DEVICE bool take(TilePlace& tile) {
    constexpr int kTilesTogether = 256;
    int index = take_number(&p_.order->next), count = p_.order->count;
    if (index >= count * p_.heads) return false;
    int together = max(1, kTilesTogether / (count * p_.group)) * p_.group;
    int before = (p_.heads - p_.order->last_heads) / together * together;
    int first_head = min(index / (count * together) * together, before);
    int here = first_head < before ? together : p_.heads - before;
    index -= first_head * count;
    Sm90OrderPlace place = p_.order->places[index / here];
    tile = {place.tile, first_head + index % here, place.sequence};
    return true;
  }

  // Assigns tiles of one query at a time until one is this block's.
  TC_DEVICE bool assign(TilePlace& tile) {
    while (next_ < total_) {
      int mine, count = loads_.give(place_.heads - place_.head, step_, mine);
      int query = place_.query, head = place_.first_head + place_.head + mine;
      next_ += count;
      place_.head += count;
      if (place_.head == place_.heads) {
        place_.head = 0;
        if (--place_.query < 0) place_ = locate(next_);
        step_ = cost(place_.query);
      }
      if (mine >= 0) {
        set(tile, query, head);
        return true;
      }
    }
    return false;
  }

  const Sm90AttentionParams& p_;
  int block_, blocks_, total_;
  int next_;                          // if balanced: the first tile that no block has yet
  int second_ = -1, first_head_ = 0;  // kInPairs: the rest of a pair
  BatchOrder order_;                  // kOrders
  BlockLoads loads_;
  Place place_;
  unsigned step_;
};

}  // namespace sm90
}  // namespace torch_cubin
