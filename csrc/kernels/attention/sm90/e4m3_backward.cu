// Attention's gradients on Hopper for queries, keys and values of e4m3: sm90/backward.cu, with
// three of its five products of 8-bit types.
//
//   S = q k^T      dP = grad_out v^T     e4m3; grad_out rounded row by row
//   dq = dS k                            dS of e5m2, k of e4m3
//   dv = P^T grad_out    dk = dS^T q     bfloat16: wgmma's sums of 8-bit types have some 14 bits,
//                                        and these have as many addends as there are queries
//
// Sums of the first two have at most 128 addends; dq is added in float32 after every 128 keys. P
// and dS are rounded to bfloat16 for dv and dk. dS has the range of bfloat16's weights times sums
// of products of e4m3, so that 8 bits have to be mostly exponent: e5m2.
//
// The roles of the warps are those of sm90/backward_block.cuh. Differences:
//   - wgmma needs 8-bit operands K-major. For dq, keys are (column, key), and dS is stored as
//     (query, key), by transposing pairs of bytes: those of keys 8 apart, which a thread has. So
//     within 16 keys, the first and the last 8 are interleaved.
//   - The warpgroup of dq makes these keys, and q in bfloat16 (sm90/e4m3_backward_queries.cuh). In
//     the kernels for many steps sm90/e4m3_backward_delta.cu makes q, and the TMA loads it, too.
//   - sm90/e4m3_backward_delta.cu rounds grad_out.
//   - The factors q_descale and k_descale are in the unit of the scores, and in those of dk and dq.
//
// Single blocks of 128 columns wait for their additions of dq, in float32. In pairs (TC_PAIR), as
// in sm90/backward_wide.cu, the two blocks of a cluster have adjacent keys and the same steps. They
// send each other dS, 6 KB in 8 bits, and each multiplies both blocks' dS with half of the columns
// of all 256 keys, so that it adds half as much, and stores and reads half as much of dq in shared
// memory. Neither waits for the other noticeably. Where queries see few keys, steps that only one
// block's keys see cost more than that.
#include "backward_keys.cuh"
#include "e4m3_backward_queries.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

template <int kRows_, int kD_, int kQStages_, int kGradStages_, bool kWidens_, bool kPair_>
struct E4m3BackwardConfig
    : BackwardConfig<DType::bfloat16, kRows_, kD_, kQStages_, kGradStages_, false, false> {
  using Base = BackwardConfig<DType::bfloat16, kRows_, kD_, kQStages_, kGradStages_, false, false>;
  using Base::kRows, Base::kD, Base::kKeys, Base::kPieceBytes, Base::kDqStages, Base::kQStages,
      Base::kGradStages, Base::kScoreStages, Base::kQBytes, Base::kWorkItems, Base::kPanels;
  static constexpr bool kPair = kPair_;
  static constexpr int kBlocks = kPair ? 2 : 1, kWorkKeys = kBlocks * kKeys;
  static constexpr int kPieces = kPanels / kBlocks, kScoreReaders = 4 * kBlocks;
  static_assert(kD == 64 || kD == 128);
  // Whether the block makes q in bfloat16, or sm90/e4m3_backward_delta.cu.
  static constexpr bool kWidens = kWidens_;
  // A row of q, k, v and grad_out in bytes is one panel.
  static constexpr int kKeyBytes = kKeys * kD, kByteRows = kRows * kD;
  static constexpr int kScoreBytes = kRows * kWorkKeys;  // rows of 128 bytes, except a pair's
  // A pair's dS is not swizzled: [16 keys][query][key], so that what a warp sends is contiguous.
  static constexpr int kChunkBytes = 16 * kRows;
  static constexpr int kSumBytes = 3 * kRows * 4;
  static constexpr int kMaskWords = 0, kMaskBytes = 0;
  static constexpr int kK = 0, kV = kKeyBytes, kTurned = 2 * kKeyBytes;
  static constexpr int kOther = 3 * kKeyBytes, kQ = (kPair ? 4 : 3) * kKeyBytes;
  static constexpr int kGrad = kQ + kQStages * kQBytes;  // both of 16 bits
  static constexpr int kQInBytes = kGrad + kGradStages * kQBytes;
  static constexpr int kGradInBytes = kQInBytes + kQStages * kByteRows;
  static constexpr int kScore = kGradInBytes + kGradStages * kByteRows;
  static constexpr int kDq = kScore + kScoreStages * kScoreBytes;
  static constexpr bool kTwoStepsFit = kDq + kDqStages * kPieces * kPieceBytes <= 208 * 1024;
  static constexpr int kDqSlots = (kTwoStepsFit ? kDqStages : 1) * kPieces;
  static constexpr int kOut = kDq + kDqSlots * kPieceBytes;  // dk, dv: 16 rows of 64 columns a warp
  static constexpr int kOutBytes = 16 * 128;
  static constexpr int kSums = kOut + 8 * kOutBytes;
  static constexpr int kMask = kSums + kQStages * kSumBytes;
  static constexpr int kKeysFull = kMask, kKeysEmpty = kKeysFull + 8;
  static constexpr int kValuesFull = kKeysEmpty + 8, kValuesEmpty = kValuesFull + 8;
  static constexpr int kWorkFull = kValuesEmpty + 8, kWorkEmpty = kWorkFull + 8 * kWorkItems;
  static constexpr int kWanted = kWorkEmpty + 8 * kWorkItems;
  static constexpr int kQFull = kWanted + 8, kQEmpty = kQFull + 8 * kQStages;
  static constexpr int kGradFull = kQEmpty + 8 * kQStages, kGradEmpty = kGradFull + 8 * kGradStages;
  static constexpr int kScoreFull = kGradEmpty + 8 * kGradStages;
  static constexpr int kScoreEmpty = kScoreFull + 8 * kScoreStages;
  static constexpr int kDqFull = kScoreEmpty + 8 * kScoreStages,
                       kDqEmpty = kDqFull + 8 * kDqStages * kPieces;
  static constexpr int kWideFull = kDqEmpty + 8 * kDqStages * kPieces;  // q of 16 bits
  static constexpr int kNumberFull = kWideFull + 8 * kQStages,
                       kNumberEmpty = kNumberFull + 8 * kWorkItems * kPair;
  static constexpr int kFirstRow = kNumberEmpty + 8 * kWorkItems * kPair;
  static constexpr int kNumber = (kFirstRow + 4 * kQStages + 15) / 16 * 16;
  static constexpr int kWork = kNumber + 16 * kWorkItems * kPair;
  static constexpr int kSharedBytes =
      kWork + (kWorkItems * static_cast<int>(sizeof(KeyBlock)) + 15) / 16 * 16;
  static_assert(kScore % 1024 == 0 && kScoreBytes % 1024 == 0 && kByteRows % 1024 == 0);

  static constexpr TC_DEVICE int dq_lag(int piece) {
    return piece >= kDqSlots ? 0 : (kDqSlots - piece + kPieces - 1) / kPieces;
  }
  static constexpr TC_DEVICE int dq_before(int piece) {
    return (piece + kPieces * dq_lag(piece) - kDqSlots) % kPieces;
  }
};

// Loads the keys of a work item, and then its steps; `next` is the first step's number.
template <class C>
TC_DEVICE void load_bytes_of_work(const Sm90E4m3BackwardParams& p, u32 shared, const KeyBlock& work,
                                  u32 number, u32& next, PairPlace pair) {
  Steps steps(p, work);
  const Sm90Sequence& s = work.sequence;
  int keys = work.key_tile * C::kWorkKeys, key = keys + static_cast<int>(pair.rank) * C::kKeys;
  auto load_keys = [&] {
    u32 full = begin_values<C>(shared, number, C::kKeyBytes);
    tma_load(shared + C::kV, &p.v, full, 0, s.k.place + key, work.head, s.k.batch, s.wrap);
    full = begin_keys<C>(shared, number, C::kBlocks * C::kKeyBytes);
    tma_load(shared + C::kK, &p.k, full, 0, s.k.place + key, work.head, s.k.batch, s.wrap);
    if constexpr (C::kPair) {
      tma_load(shared + C::kOther, &p.k, full, 0,
               s.k.place + keys + static_cast<int>(pair.rank ^ 1) * C::kKeys, work.head, s.k.batch,
               s.wrap);
    }
  };
  u32 first = next, end = next + work.steps;
  u32 last = end - min(work.steps, kStepsAhead);
  if (work.steps == 0) {  // no step needs them
    begin_values<C>(shared, number, 0);
    begin_keys<C>(shared, number, 0);
    request_work<C>(shared, pair);
  }
#pragma unroll 1
  while (next != end) {
    const Steps now = steps;
    steps.next(p, work);
    if (next == last) request_work<C>(shared, pair);
    int row = now.tile * C::kRows, head = work.head * p.group + now.head;
    u32 q = slot<C::kQStages>(next), grad = slot<C::kGradStages>(next);
    u32 full = shared + C::kQFull + 8 * q;
    u32 hidden = 8 * row + hides<C>(s, key, row) + 2 * hides<C>(s, key + 64, row);
    barrier_sleep(shared + C::kQEmpty + 8 * q, phase<C::kQStages>(next) ^ 1);
    store_shared(shared + C::kFirstRow + 4 * q, hidden);
    barrier_expect(full, C::kByteRows + C::kSumBytes + (C::kWidens ? 0 : C::kQBytes));
    if constexpr (!C::kWidens) {
      load_panels<C>(shared + C::kQ + q * C::kQBytes, C::kRows * 128, p.wide_q, full, s.q, row,
                     head, s.wrap);
    }
    tma_load(shared + C::kQInBytes + q * C::kByteRows, &p.q, full, 0, s.q.place + row, head,
             s.q.batch, s.wrap);
    tc_int64 tile = work.first_tile + now.head * p.tiles + now.tile;
    bulk_load(shared + C::kSums + q * C::kSumBytes, p.sums + tile * (3 * C::kRows), C::kSumBytes,
              full);
    full = shared + C::kGradFull + 8 * grad;
    barrier_sleep(shared + C::kGradEmpty + 8 * grad, phase<C::kGradStages>(next) ^ 1);
    barrier_expect(full, C::kByteRows + C::kQBytes);
    tma_load(shared + C::kGradInBytes + grad * C::kByteRows, &p.grad_bytes, full, 0,
             s.q.place + row, head, s.q.batch, s.wrap);
    load_panels<C>(shared + C::kGrad + grad * C::kQBytes, C::kRows * 128, p.grad_out, full, s.q,
                   row, head, s.wrap);
    // After a step's loads, which wait for less of the previous work item.
    if (next++ == first) load_keys();
  }
}

template <class C>
TC_DEVICE void load_bytes(const Sm90E4m3BackwardParams& p, u32 shared, const KeyBlock* items,
                          PairPlace pair) {
  u32 step = 0;
#pragma unroll 1
  for (u32 number = 0;; ++number) {
    if (!wait_for_work<C>(shared, items, number)) return;
    const KeyBlock& work = items[slot<C::kWorkItems>(number)];
    load_bytes_of_work<C>(p, shared, work, number, step, pair);
    release_work<C>(shared, number);
  }
}

// out = keys * rows^T, for 64 keys.
template <class C>
TC_DEVICE void multiply_bytes(float (&out)[C::kRows / 2], u32 keys, u32 rows) {
  const u64 high = k_major_descriptor<C::kD>(0);
#pragma unroll
  for (int i = 0; i < C::kD / 32; ++i) {
    WgmmaBytes<C::kRows>::by_e4m3(out, descriptor(high, descriptor_low<C>(keys), 32 * i),
                                  descriptor(high, descriptor_low<C>(rows), 32 * i), i > 0);
  }
  wgmma_commit();
}

// The warpgroup of 64 keys: Keys of sm90/backward.cu.
template <class C>
struct ByteKeys : KeyGroup<C, Sm90E4m3BackwardParams> {
  using Group = KeyGroup<C, Sm90E4m3BackwardParams>;
  using Group::p, Group::shared, Group::items, Group::keys64, Group::number, Group::step;
  using Group::warp, Group::lane, Group::work, Group::q, Group::grad, Group::sums_at,
      Group::wait_for_grad;
  u32 store_base;  // this thread's
  u32 other;       // a pair's other block's shared memory
  float unit;      // from products to powers of two
  float dk[C::kD / 2], dv[C::kD / 2], s[C::kRows / 2], dp[C::kRows / 2];

  TC_DEVICE ByteKeys(const Sm90E4m3BackwardParams& p, u32 shared, const KeyBlock* items, int group,
                     PairPlace pair)
      : Group{p, shared, items, group}, other(pair.other) {
    if constexpr (C::kPair) {
      int chunk = 8 * static_cast<int>(pair.rank) + 4 * group + warp();
      store_base = shared + C::kScore + chunk * C::kChunkBytes + lane() % 16 * 16;
    } else {
      store_base =
          shared + C::kScore + lane() % 16 * 128 + ((4 * group + warp()) * 16 ^ lane() % 8 * 16);
    }
  }

  // This warp's first key.
  TC_DEVICE int first_key() const {
    int tile = work().key_tile * C::kBlocks + (C::kPair ? static_cast<int>(cluster_rank()) : 0);
    return tile * C::kKeys + 64 * keys64 + 16 * warp();
  }
  TC_DEVICE int own_key() const { return first_key() + lane() / 4; }

  TC_DEVICE void begin_scores() {
    this->wait_for_q();
    wgmma_fence();
    multiply_bytes<C>(s, shared + C::kK + keys64 * (64 * C::kD),
                      shared + C::kQInBytes + q() * C::kByteRows);
  }

  TC_DEVICE void begin_dp() {
    wait_for_grad();
    wgmma_fence();
    multiply_bytes<C>(dp, shared + C::kV + keys64 * (64 * C::kD),
                      shared + C::kGradInBytes + grad() * C::kByteRows);
  }

  // Sets P and dS of hidden elements to 0, for any values of q, k, v and grad_out there.
  TC_DEVICE void hide() {
    for_each_hidden<C>(work().sequence, shared, q(), keys64, own_key(),
                       [&](int i) { s[i] = dp[i] = 0.0f; });
  }

  // P and dS interleaved: one after the other, ptxas runs out of registers.
  TC_DEVICE void pack(u32 (&weights)[C::kRows / 16][4], u32 (&ds)[C::kRows / 16][4],
                      u32 (&bytes)[C::kRows / 8]) const {
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 8 * i + 2 * j;
        weights[i][j] = pack_bf16(s[at], s[at + 1]);
        ds[i][j] = pack_bf16(dp[at], dp[at + 1]);
        if (j % 2 == 0)
          bytes[2 * i + j / 2] = pack_e5m2(dp[at], dp[at + 2], dp[at + 1], dp[at + 3]);
      }
  }

  // Stores a warp's dS of a step to shared memory, [query][key], for the warpgroup of dq; in a pair
  // for both blocks', whose other block sends as many bytes.
  TC_DEVICE void send_scores(u32 of, const u32 (&bytes)[C::kRows / 8]) {
    u32 at = slot<C::kScoreStages>(of), to = store_base + at * C::kScoreBytes;
    barrier_wait(shared + C::kScoreEmpty + 8 * at, phase<C::kScoreStages>(of) ^ 1);
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) {
      stmatrix_transposed(to + i * (C::kPair ? 16 * 16 : 16 * 128), bytes[2 * i], bytes[2 * i + 1]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane() != 0) return;
    u32 full = C::kScoreFull + 8 * at;
    if constexpr (C::kPair) {
      bulk_copy_remote(other + (to - shared), to, C::kChunkBytes, other + full);
      barrier_expect(shared + full, C::kChunkBytes);
    } else {
      barrier_arrive(shared + full);
    }
  }

  // Adds a step's dv and dk.
  TC_DEVICE void begin_sums(u32 of, const u32 (&weights)[C::kRows / 16][4],
                            const u32 (&ds)[C::kRows / 16][4]) {
    wgmma_fence();
    add_rows<C>(dv, weights, shared + C::kGrad + slot<C::kGradStages>(of) * C::kQBytes);
    add_rows<C>(dk, ds, shared + C::kQ + slot<C::kQStages>(of) * C::kQBytes);
  }

  // Before begin_sums(), and while no product is in flight.
  TC_DEVICE void wait_for_wide(u32 of) const {
    if constexpr (!C::kWidens) return;
    barrier_wait(shared + C::kWideFull + 8 * slot<C::kQStages>(of), phase<C::kQStages>(of));
  }

  TC_DEVICE void wait_for_sums() {
    wgmma_wait<0>();
    keep_in_place(dk);
    keep_in_place(dv);
  }

  // Scores to weights, once their product is complete.
  TC_DEVICE void weigh() {
    keep_in_place(s);
    exponentiate<C>(s, sums_at(), unit);
    keep_in_place(s);
    // Without a barrier here ptxas would wait for other products before the exponentials.
    wait_for_grad();
  }

  // dP to dS, once its product is complete; both are rounded.
  TC_DEVICE void finish_scores(u32 (&weights)[C::kRows / 16][4], u32 (&ds)[C::kRows / 16][4],
                               u32 (&bytes)[C::kRows / 8]) {
    wgmma_wait<0>();
    keep_in_place(dp);
    differentiate<C>(dp, s, sums_at() + C::kRows * 4);
    hide();
    pack(weights, ds, bytes);
  }

  // A step's scores are multiplied before the previous step's dv and dk, during which they become
  // weights.
  TC_DEVICE void run_steps(u32 end) {
    u32 weights[C::kRows / 16][4], ds[C::kRows / 16][4], bytes[C::kRows / 8];
    begin_scores();
    this->wait_for_values();
    begin_dp();
    wgmma_wait<1>();
    weigh();
    finish_scores(weights, ds, bytes);
#pragma unroll 1
    while (step + 1 != end) {
      u32 before = step++;
      wait_for_wide(before);
      begin_scores();
      begin_sums(before, weights, ds);
      send_scores(before, bytes);
      wgmma_wait<2>();
      weigh();
      wait_for_sums();
      begin_dp();
      end_step<C>(shared, keys64, before);
      finish_scores(weights, ds, bytes);
    }
    release_keys<C>(shared);
    send_scores(step, bytes);
    wait_for_wide(step);
    begin_sums(step, weights, ds);
    wait_for_sums();
    end_step<C>(shared, keys64, step++);
  }

  TC_DEVICE void run() {
#pragma unroll 1
    for (;; ++number) {
      if (!begin_work<C>(shared, items, number)) {
        tma_store_wait_read<0>();  // shared memory must outlive the store's reads
        return;
      }
      unit = p.unit * descale_of_head(p.q_descale, work().batch, work().head) *
             descale_of_head(p.k_descale, work().batch, work().head);
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.0f;
      barrier_wait(shared + C::kKeysFull, phase<1>(number));
      keep_in_place(dk);
      keep_in_place(dv);
      for_each_step<C>(*this, [&](u32 end) { run_steps(end); });
      send();
      __syncwarp();
      if (lane() == 0) release_work<C>(shared, number);
    }
  }

 private:
  TC_DEVICE void send() const {
    constexpr float kUnshift = 1 << kE4m3WeightShift;
    float dk_factor = p.scale * kUnshift * descale_of_head(p.q_descale, work().batch, work().head) *
                      descale_of_head(p.v_descale, work().batch, work().head);
    auto buffer = [&](int) { return shared + C::kOut + (4 * keys64 + warp()) * C::kOutBytes; };
    int first = first_key();
    send_rows<C, 0>(dv, kUnshift, p.dv_map, work(), first, buffer);
    send_rows<C, 0>(dk, dk_factor, p.dk_map, work(), first, buffer);
  }
};

struct ByteRoles : BlockRoles {
  template <class C>
  static TC_DEVICE void load(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                             PairPlace pair) {
    load_bytes<C>(static_cast<const Sm90E4m3BackwardParams&>(p), shared, items, pair);
  }

  template <class C>
  using Dq = DqAndConversions<C>;

  template <class C>
  static TC_DEVICE void run(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                            int group, PairPlace pair) {
    ByteKeys<C>(static_cast<const Sm90E4m3BackwardParams&>(p), shared, items, group, pair).run();
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90E4m3BackwardParams p) {
  using C = E4m3BackwardConfig<TC_TILE_M, TC_TILE_K, TC_STAGES, TC_GRAD_STAGES, TC_WIDENS, TC_PAIR>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kWorkKeys == TC_TILE_N);
  if (threadIdx.x == 0) {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 shared = shared_address(memory);
    prefetch_tensor_map(&p.grad_bytes);
    for (int i = 0; i < C::kQStages; ++i) barrier_init(shared + C::kWideFull + 8 * i, 4);
  }
  torch_cubin::sm90::run<C, ByteRoles>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_backward_attention_{t.name}{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "kind": "backward", "dtype": "float8_e4m3fn", "math": "bfloat16",
   "takes": ["plain", "unmasked", "rule"], "tile": "{t.tile}", "cluster": "{t.cluster}",
   "block": [512, 1, 1], "stages": 3, "dynamic_shared": "{t.shared}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"}, "widens": "{t.widens}",
   "defines": {"TC_GRAD_STAGES": 2, "TC_WIDENS": "{t.widens}", "TC_PAIR": "{t.pair}"},
   "for": {
    "t": [
     ["name", "tile", "widens", "pair", "cluster", "shared", "k_tile", "fixed"],
     ["",      [96, 128, 64],  1, 0, [1, 1, 1], 210736, 2700, 6000],
     ["",      [48, 128, 128], 1, 0, [1, 1, 1], 221328, 2600, 7000],
     ["",      [48, 256, 128], 1, 1, [2, 1, 1], 225456, 2600, 7000],
     ["wide_", [96, 128, 64],  0, 0, [1, 1, 1], 210736, 2700, 6000],
     ["wide_", [48, 256, 128], 0, 1, [2, 1, 1], 225456, 2600, 7000]]}}]}
*/
