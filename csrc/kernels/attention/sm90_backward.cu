// Attention's gradients on Hopper, from logsumexp and delta (sm90_backward_delta.cu); dq as sums that
// sm90_backward_convert.cu rounds:
//
//   S = scale q k^T      P = exp(S - logsumexp)      dP = grad_out v^T     dS = P (dP - delta)
//   dv = P^T grad_out    dk = scale dS^T q           dq = scale dS k
//
// A block owns 128 keys of one head of keys; it walks through the tiles of queries that see them, of all
// heads of the group, last queries first. Its warpgroups:
//
//   producer   one thread loads k and v, then a step's q, grad_out and sums; two threads, for one step in
//              two each, add dq, as it lies in shared memory, to dq_sum
//   keys (2)   64 keys each: S, dP and dS, transposed, so that P and dS are operands in registers as they
//              are; dk and dv stay in registers
//   queries    dq, transposed too, from dS in shared memory
//
//   shared memory:  k, v | q: kQStages | grad_out: kGradStages | dS: 2 | dq: 2 | sums: kQStages | barriers
//
// The warpgroups of keys wait for nothing but their own products, so that one exponentiates while others
// multiply, and dq with its way out is in nobody's chain. Registers decide the steps' length: ptxas
// wants 32 beside the accumulators. Longer than files should be: the roles meet in one step's barriers
// and shared memory, and none can be followed without the others.
#include "common/dropout.cuh"
#include "common/dtype.cuh"
#include "common/wgmma.cuh"
#include "sm90_backward_dq.cuh"
#include "sm90_rule.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

// What a block does, as one thread tells the others through shared memory.
struct KeyBlock {
  Sm90Sequence sequence;
  int key_tile;     // negative: nothing
  int head, batch;  // head: of the keys
  int first_tile;   // the number of the first tile of queries of the group's first head
  int begin, end;   // tiles of queries that see the keys

  // Neighbouring blocks have the same keys' place in `together` heads; then come the next keys.
  TC_DEVICE KeyBlock(const Sm90BackwardParams& p, int rows) {
    int kv_heads = p.heads / p.group;
    bool packed = p.order != nullptr;
    u32 pairs = static_cast<u32>(packed ? 1 : p.batch) * kv_heads;
    u32 each = static_cast<u32>(p.together) * p.key_tiles;
    u32 set = blockIdx.x / each, rest = blockIdx.x % each;
    u32 here = min(static_cast<u32>(p.together), pairs - set * p.together);
    u32 pair = set * p.together + rest % here;
    key_tile = static_cast<int>(rest / here);
    batch = static_cast<int>(pair / kv_heads);
    head = static_cast<int>(pair % kv_heads);
    if (packed) {
      if (key_tile >= p.order->count) {
        key_tile = -1;
        return;
      }
      Sm90OrderPlace place = p.order->places[key_tile];
      key_tile = place.tile;
      batch = place.sequence;
    }
    sequence = Sm90Sequence(p.lengths, batch);
    SeenTiles seen(sequence, key_tile, rows);
    begin = seen.begin;
    end = seen.end;
    first_tile =
        packed ? head * p.group * p.tiles + first_query_tile(p.lengths.cu_seqlens_q, batch, rows)
               : (batch * p.heads + head * p.group) * p.tiles;
  }
};

template <DType kDType_, int kRows_, int kD_, int kQStages_, int kGradStages_, bool kGeneral_>
struct BackwardConfig {
  static constexpr DType kDType = kDType_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kRows = kRows_, kD = kD_;  // queries a step, columns of every operand
  static constexpr int kQStages = kQStages_, kGradStages = kGradStages_, kScoreStages = 2,
                       kDqStages = 2;
  static constexpr int kKeys = kSm90BackwardKeys, kGroups = 2, kThreads = 512;
  static constexpr int kPanels = kD / 64, kRowPanels = (kRows + 63) / 64;
  static constexpr int kProducerRegisters = 24, kKeyRegisters = kD == 64 ? 200 : 208;
  static constexpr int kQueryRegisters = 512 - kProducerRegisters - 2 * kKeyRegisters;
  static constexpr WgmmaType kType = kDType == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;

  static constexpr int kPanelBytes = kKeys * 128;  // of k, v and dS
  static constexpr int kKeyBytes = kPanels * kPanelBytes, kQBytes = kRows * kD * 2;
  static constexpr int kScoreBytes = kRowPanels * kPanelBytes, kPieceBytes = 64 * kRows * 4;
  static constexpr int kSumBytes = 2 * kRows * 4;
  static constexpr int kK = 0, kV = kKeyBytes, kQ = 2 * kKeyBytes, kGrad = kQ + kQStages * kQBytes;
  static constexpr int kScore = kGrad + kGradStages * kQBytes;
  static constexpr int kDq = kScore + kScoreStages * kScoreBytes;
  static constexpr int kDqBytes = kPanels * kPieceBytes;
  static constexpr int kSums = kDq + kDqStages * kDqBytes;
  static constexpr int kKeysFull = kSums + kQStages * kSumBytes;
  static constexpr int kQFull = kKeysFull + 8, kQEmpty = kQFull + 8 * kQStages;
  static constexpr int kGradFull = kQEmpty + 8 * kQStages, kGradEmpty = kGradFull + 8 * kGradStages;
  static constexpr int kScoreFull = kGradEmpty + 8 * kGradStages;
  static constexpr int kScoreEmpty = kScoreFull + 8 * kScoreStages;
  static constexpr int kDqFull = kScoreEmpty + 8 * kScoreStages,
                       kDqEmpty = kDqFull + 8 * kDqStages * kPanels;
  // For each slot of q 4 times the first row, and a bit for each warpgroup of keys that must hide some;
  // and the head, for `general` kernels.
  static constexpr int kFirstRow = kDqEmpty + 8 * kDqStages * kPanels;
  static constexpr int kHead = kFirstRow + 4 * kQStages;
  static constexpr int kWork = (kHead + 4 * kQStages + 15) / 16 * 16;
  static constexpr int kSharedBytes = kWork + (static_cast<int>(sizeof(KeyBlock)) + 15) / 16 * 16;
  static_assert(kPanels <= 2 && kGroups == 2 && kRows % 16 == 0);
};

// The steps of a block: tiles of queries, the last one first, of one head of the group after the other.
struct Steps {
  int begin, end;
  int count;  // of all heads
  int tile, head;

  TC_DEVICE Steps(const Sm90BackwardParams& p, const KeyBlock& work)
      : begin(work.begin), end(work.end), tile(work.end - 1), head(0) {
    count = max(0, end - begin) * p.group;
  }
  TC_DEVICE void next() {
    if (--tile < begin) {
      tile = end - 1;
      ++head;
    }
  }
};

// Which slot of a ring step `step` has, and the parity of its phase.
template <int kStages>
TC_DEVICE u32 slot(u32 step) {
  return step % kStages;
}

template <int kStages>
TC_DEVICE u32 phase(u32 step) {
  return step / kStages % 2;
}

// ---- producer -----------------------------------------------------------------------------------

template <class C>
TC_DEVICE void load_panels(u32 to, int panel_bytes, const Sm90AttentionMap& map, u32 barrier,
                           MapPlace at, int row, int head, int wrap) {
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    tma_load(to + panel * panel_bytes, &map, barrier, 64 * panel, at.place + row, head, at.batch,
             wrap);
  }
}

// Whether the warpgroup whose first key is `key` must hide some of a step's scores.
template <class C>
TC_DEVICE bool hides(const Sm90Sequence& s, int key, int row) {
  return key + 63 >= s.columns || row + C::kRows > s.rows || row + s.last < key + 63 ||
         row + C::kRows - 1 + s.first > key;
}

template <class C>
TC_DEVICE void load(const Sm90BackwardParams& p, u32 shared, const KeyBlock& work) {
  Steps step(p, work);
  if (step.count == 0) return;
  const Sm90Sequence& s = work.sequence;
  u32 keys = shared + C::kKeysFull;
  barrier_expect(keys, 2 * C::kKeyBytes);
  int key = work.key_tile * C::kKeys;
  load_panels<C>(shared + C::kK, C::kPanelBytes, p.k, keys, s.k, key, work.head, s.wrap);
  load_panels<C>(shared + C::kV, C::kPanelBytes, p.v, keys, s.k, key, work.head, s.wrap);
#pragma unroll 1
  for (int i = 0; i < step.count; ++i, step.next()) {
    int row = step.tile * C::kRows, head = work.head * p.group + step.head;
    u32 q = slot<C::kQStages>(i), grad = slot<C::kGradStages>(i);
    u32 full = shared + C::kQFull + 8 * q;
    u32 hidden = 4 * row + hides<C>(s, key, row) + 2 * hides<C>(s, key + 64, row);
    barrier_sleep(shared + C::kQEmpty + 8 * q, phase<C::kQStages>(i) ^ 1);
    store_shared(shared + C::kFirstRow + 4 * q, hidden);
    if (C::kGeneral) store_shared(shared + C::kHead + 4 * q, static_cast<u32>(head));
    barrier_expect(full, C::kQBytes + C::kSumBytes);
    load_panels<C>(shared + C::kQ + q * C::kQBytes, C::kRows * 128, p.q, full, s.q, row, head,
                   s.wrap);
    tc_int64 tile = work.first_tile + step.head * p.tiles + step.tile;
    bulk_load(shared + C::kSums + q * C::kSumBytes, p.sums + tile * (2 * C::kRows), C::kSumBytes,
              full);
    full = shared + C::kGradFull + 8 * grad;
    barrier_sleep(shared + C::kGradEmpty + 8 * grad, phase<C::kGradStages>(i) ^ 1);
    barrier_expect(full, C::kQBytes);
    load_panels<C>(shared + C::kGrad + grad * C::kQBytes, C::kRows * 128, p.grad_out, full, s.q,
                   row, head, s.wrap);
  }
}

// NOTE: neither acquires nor releases. A block stores a turn when its additions are complete in the L2
// cache, and the next one's are not issued before it has seen that; fences would add 1 us to each turn.
TC_DEVICE int load_turn(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

TC_DEVICE void store_turn(int* at, int value) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

TC_DEVICE void wait_for_turn(const int* at, int rank) {
#ifdef TC_BOUND_NANOSECONDS
  u64 start = 0, now;
#endif
  while (load_turn(at) != rank) {
#ifdef TC_BOUND_NANOSECONDS
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (now - start > TC_BOUND_NANOSECONDS) asm volatile("trap;");
#endif
  }
}

// Adds the dq of every kDqStages-th step to dq_sum, each tile of queries when it is this block's turn. A
// thread each stage: from an addition's begin to the next block's turn some 2 us pass, more than a step.
template <class C>
TC_DEVICE void add_dq(const Sm90BackwardParams& p, u32 shared, const KeyBlock& work, int stage) {
  Steps step(p, work);
  u32 full = shared + C::kDqFull + 8 * C::kPanels * stage;
  u32 empty = shared + C::kDqEmpty + 8 * C::kPanels * stage;
  u32 from = shared + C::kDq + stage * C::kDqBytes;
#pragma unroll 1
  for (int i = 0; i < step.count; ++i, step.next()) {
    if (i % C::kDqStages != stage) continue;
    tc_int64 tile = work.first_tile + step.head * p.tiles + step.tile;
    int rank = work.key_tile - first_key_tile(work.sequence, step.tile, C::kRows);
    float* to = p.dq_sum + tile * (C::kRows * C::kD);
    if (rank > 0) {
      wait_for_turn(p.turns + tile, rank);
      fence_async_proxy_everywhere();
    }
#pragma unroll
    for (int piece = 0; piece < C::kPanels; ++piece) {
      barrier_sleep(full + 8 * piece, phase<C::kDqStages>(i));
      float* there = to + piece * (64 * C::kRows);
      if (rank > 0) {
        bulk_add(there, from + piece * C::kPieceBytes, C::kPieceBytes);
      } else {
        bulk_store(there, from + piece * C::kPieceBytes, C::kPieceBytes);
      }
      tma_store_commit();
    }
    if constexpr (C::kPanels == 2) {
      tma_store_wait_read<1>();
      barrier_arrive(empty);
    }
    tma_store_wait_read<0>();
    barrier_arrive(empty + 8 * (C::kPanels - 1));
    tma_store_wait<0>();
    fence_async_proxy_everywhere();
    store_turn(p.turns + tile, rank + 1);
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// The high word of a descriptor is the same for all whose leading bytes do not count.
TC_DEVICE u64 descriptor(u64 base, u32 low, u32 bytes) { return base | (low + (bytes >> 4)); }

template <class C>
struct Queries {
  const Sm90BackwardParams& p;
  u32 shared;
  float dq[C::kRows / 2];

  static TC_DEVICE int lane() { return threadIdx.x % 32; }
  TC_DEVICE void release(u32 barrier) {
    __syncwarp();  // the other lanes have read, too
    if (lane() == 0) barrier_arrive(barrier);
  }

  // 64 columns of dq, transposed: k^T dS^T.
  TC_DEVICE void multiply(u32 scores, int piece) {
    const u64 high_a = wgmma_descriptor(0, 0, 1024);
    const u64 high_b = wgmma_descriptor(0, C::kPanelBytes, 1024);  // 64 queries: a panel further
    u32 a = (shared + C::kK + piece * C::kPanelBytes) >> 4, b = scores >> 4;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      Wgmma<C::kRows>::template run<C::kType, 1, 1>(dq, descriptor(high_a, a, 2048 * k),
                                                    descriptor(high_b, b, 2048 * k), k > 0);
    }
    wgmma_commit();
  }

  TC_DEVICE void store(int stage, int piece) {
    u32 to = shared + C::kDq + stage * C::kDqBytes + piece * C::kPieceBytes +
             threadIdx.x % 128 / 32 * (C::kPieceBytes / 4) + lane() * 16;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      store_shared(to + j * 512, *reinterpret_cast<float (*)[4]>(&dq[4 * j]));
    }
    fence_async_proxy();
    release(shared + C::kDqFull + 8 * (C::kPanels * stage + piece));
  }

  TC_DEVICE void run(u32 steps) {
    if (steps > 0) barrier_wait(shared + C::kKeysFull, 0);
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
      u32 score = slot<C::kScoreStages>(step), out = slot<C::kDqStages>(step);
      barrier_wait(shared + C::kScoreFull + 8 * score, phase<C::kScoreStages>(step));
#pragma unroll
      for (int piece = 0; piece < C::kPanels; ++piece) {
        multiply(shared + C::kScore + score * C::kScoreBytes, piece);
        barrier_wait(shared + C::kDqEmpty + 8 * (C::kPanels * out + piece),
                     phase<C::kDqStages>(step) ^ 1);
        wgmma_wait<0>();
        keep_in_place(dq);
        if (piece == C::kPanels - 1) release(shared + C::kScoreEmpty + 8 * score);
        store(out, piece);
      }
    }
  }
};

template <class C>
struct Keys {
  const Sm90BackwardParams& p;
  u32 shared;
  const KeyBlock& work;
  int group, key;        // key: the warpgroup's first
  u32 step = 0;          // of all heads
  u32 sums, store_base;  // this thread's
  float dk[C::kD / 2], dv[C::kD / 2], s[C::kRows / 2], dp[C::kRows / 2];

  TC_DEVICE Keys(const Sm90BackwardParams& params, u32 memory, const KeyBlock& block, int number)
      : p(params),
        shared(memory),
        work(block),
        group(number),
        key(block.key_tile * C::kKeys + 64 * number) {
    sums = shared + C::kSums + lane() % 4 * 8;
    store_base = shared + C::kScore + (64 * group + 16 * warp() + lane() % 16) * 128;
#pragma unroll
    for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.0f;
  }

  static TC_DEVICE int warp() { return threadIdx.x / 32 % 4; }
  static TC_DEVICE int lane() { return threadIdx.x % 32; }
  TC_DEVICE u32 q() const { return slot<C::kQStages>(step); }
  TC_DEVICE u32 grad() const { return slot<C::kGradStages>(step); }
  TC_DEVICE u32 score() const { return slot<C::kScoreStages>(step); }

  // out = keys * rows^T.
  static TC_DEVICE void multiply_keys(float (&out)[C::kRows / 2], u32 keys, u32 rows) {
    const u64 high = wgmma_descriptor(0, 0, 1024);
#pragma unroll
    for (int i = 0; i < C::kD / 16; ++i) {
      Wgmma<C::kRows>::template run<C::kType, 0, 0>(
          out, descriptor(high, keys >> 4, i / 4 * C::kPanelBytes + i % 4 * 32),
          descriptor(high, rows >> 4, i / 4 * (C::kRows * 128) + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }

  TC_DEVICE void begin_scores() {
    barrier_wait(shared + C::kQFull + 8 * q(), phase<C::kQStages>(step));
    wgmma_fence();
    multiply_keys(s, shared + C::kK + group * 8192, shared + C::kQ + q() * C::kQBytes);
  }

  TC_DEVICE void wait_for_grad() {
    barrier_wait(shared + C::kGradFull + 8 * grad(), phase<C::kGradStages>(step));
  }

  TC_DEVICE void begin_dp() {
    wait_for_grad();
    wgmma_fence();
    multiply_keys(dp, shared + C::kV + group * 8192, shared + C::kGrad + grad() * C::kQBytes);
  }

  // sum += w * rows.
  static TC_DEVICE void add_rows(float (&sum)[C::kD / 2], const u32 (&w)[C::kRows / 16][4],
                                 u32 rows) {
    const u64 high = wgmma_descriptor(0, C::kRows * 128, 1024);  // 64 columns: a panel further
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) {
      WgmmaRegisters<C::kD>::template run<C::kType, 1>(sum, w[i],
                                                       descriptor(high, rows >> 4, i * 2048), 1);
    }
    wgmma_commit();
  }

  static TC_DEVICE void load_pair(float (&out)[2], u32 at) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(out[0]), "=f"(out[1]) : "r"(at));
  }

  // s: q.k, becomes P.
  TC_DEVICE void exponentiate() {
    u32 from = sums + q() * C::kSumBytes;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float lse[2];
      load_pair(lse, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], p.unit, -lse[r % 2]));
    }
  }

  // dp becomes dS.
  TC_DEVICE void differentiate() {
    u32 from = sums + q() * C::kSumBytes + C::kRows * 4;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float delta[2];
      load_pair(delta, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] = (dp[4 * j + r] - delta[r % 2]) * s[4 * j + r];
    }
  }

  // The same two steps of `general` kernels, where dP's sums are complete.
  TC_DEVICE void differentiate_general() {
    u32 first_row, head_word;
    load_shared(first_row, shared + C::kFirstRow + 4 * q());
    load_shared(head_word, shared + C::kHead + 4 * q());
    int head = static_cast<int>(head_word);
    int query = static_cast<int>(first_row / 4) + lane() % 4 * 2;
    int own = key + 16 * warp() + lane() / 4;
    bool drops = p.score.drop_below > 0;
    u64 kept = ~u64(0);  // a bit for each element
    if (drops) {
      kept = 0;
      int right = own % 32 / 8 & 2, odd = own % 2;
#pragma unroll
      for (int i = 0; i < C::kRows / 4; ++i) {
        int at = i / 2 * 8 + i % 2;
        DropoutBits bits(*p.score.dropout_seed, work.batch * p.heads + head, query + at, own / 32,
                         own % 8 / 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 word = right != 0 ? bits.words[2 + h] : bits.words[h];
          int number = static_cast<int>(odd != 0 ? word >> 16 : word & 0xFFFF);
          int element = i / 2 * 4 + 2 * h + i % 2;
          if (number >= p.score.drop_below) {
            kept |= u64(1) << element;
            dp[element] *= p.score.keep_scale;
          } else {
            dp[element] = 0.0f;
          }
        }
      }
    }
    u32 from = sums + q() * C::kSumBytes;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float delta[2];
      load_pair(delta, from + C::kRows * 4 + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] -= delta[r % 2];
    }
    float slope = 0.0f;
    if (p.score.alibi_slopes != nullptr) {
      slope = __ldg(p.score.alibi_slopes + work.batch * p.score.alibi_stride + head);
    }
    TileRule<true> rule(p.score, work.sequence, query, own, slope);
    auto each = [&](auto&& function) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        function(s[i], dp[i], i / 2 % 2, i / 4 * 8 + i % 2, i);
      }
    };
    torch_cubin::apply_rule(rule, each, each);
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float lse[2];
      load_pair(lse, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int i = 4 * j + r;
        s[i] = exp2_approx((s[i] - lse[r % 2]) * 1.4426950408889634f);
        dp[i] *= s[i];
      }
    }
    if (!drops) return;
#pragma unroll
    for (int i = 0; i < C::kRows / 2; ++i) {
      if ((kept >> i & 1) == 0) s[i] = 0.0f;
    }
  }

  // P and dS of what is hidden become 0, whatever is in q, k, v and grad_out there.
  TC_DEVICE void hide() {
    u32 first_row;
    load_shared(first_row, shared + C::kFirstRow + 4 * q());
    if ((first_row >> group & 1) == 0) return;
    const Sm90Sequence& of = work.sequence;
    int low[2], high[2], column = static_cast<int>(first_row / 4) + lane() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int own = key + 16 * warp() + lane() / 4 + 8 * h;
      low[h] = own < of.columns ? own - of.last - column : 1 << 30;
      high[h] = min(own - of.first, of.rows - 1) - column;
    }
#pragma unroll
    for (int i = 0; i < C::kRows / 2; ++i) {
      int at = i / 4 * 8 + i % 2, h = i / 2 % 2;
      if (at < low[h] || at > high[h]) s[i] = dp[i] = 0.0f;
    }
  }

  // Of P and dS, in turns: ptxas finds no registers for the one after the other.
  TC_DEVICE void pack(u32 (&weights)[C::kRows / 16][4], u32 (&ds)[C::kRows / 16][4]) const {
    using Traits = DTypeTraits<C::kDType>;
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 8 * i + 2 * j;
        weights[i][j] = Traits::pack(s[at], s[at + 1]);
        ds[i][j] = Traits::pack(dp[at], dp[at + 1]);
      }
  }

  // dS to shared memory, [key][query].
  TC_DEVICE void store_scores(const u32 (&w)[C::kRows / 16][4]) {
    u32 to = store_base + score() * C::kScoreBytes, swizzle = lane() % 8 * 16;
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i) {
      stmatrix(to + i / 4 * C::kPanelBytes + ((i % 4 * 32 + lane() / 16 * 16) ^ swizzle), w[i][0],
               w[i][1], w[i][2], w[i][3]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared + C::kScoreFull + 8 * score());
  }

  TC_DEVICE void run(u32 steps) {
    if (steps > 0) {
      barrier_wait(shared + C::kKeysFull, 0);
      keep_in_place(dk);
      keep_in_place(dv);
      begin_scores();
      begin_dp();
#pragma unroll 1
      for (;;) {
        wgmma_wait<1>();
        keep_in_place(s);
        if (!C::kGeneral) exponentiate();
        keep_in_place(s);
        // It is complete. ptxas would otherwise wait for dP before the exponentials.
        wait_for_grad();
        wgmma_wait<0>();
        keep_in_place(dp);
        if constexpr (C::kGeneral) {
          differentiate_general();
        } else {
          differentiate();
        }
        hide();
        u32 weights[C::kRows / 16][4], ds[C::kRows / 16][4];
        pack(weights, ds);
        wgmma_fence();
        add_rows(dv, weights, shared + C::kGrad + grad() * C::kQBytes);
        add_rows(dk, ds, shared + C::kQ + q() * C::kQBytes);
        barrier_wait(shared + C::kScoreEmpty + 8 * score(), phase<C::kScoreStages>(step) ^ 1);
        store_scores(ds);
        u32 q_empty = shared + C::kQEmpty + 8 * q();
        u32 grad_empty = shared + C::kGradEmpty + 8 * grad();
        if (++step == steps) break;
        begin_scores();
        wgmma_wait<1>();
        keep_in_place(dk);
        keep_in_place(dv);
        // After this all four warps have read their sums, and waited for their products.
        named_sync(1 + group, 128);
        if (threadIdx.x % 128 == 0) {
          barrier_arrive(grad_empty);
          barrier_arrive(q_empty);
        }
        begin_dp();
      }
      wgmma_wait<0>();
      keep_in_place(dk);
      keep_in_place(dv);
    }
    store(dk, p.scale, p.dk, p.dk_stride, p.head_dim);
    store(dv, C::kGeneral ? p.score.keep_scale : 1.0f, p.dv, p.dv_stride, p.head_dim_v);
  }

  TC_DEVICE void store(const float (&sum)[C::kD / 2], float factor, void* out,
                       const tc_int64 (&stride)[3], int width) const {
    int t = lane() % 4;
    auto base = static_cast<u16*>(out) + work.batch * stride[0] + work.head * stride[1] +
                work.sequence.k_row * stride[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = key + 16 * warp() + lane() / 4 + 8 * h;
      u16* to = base + row * stride[2] + 8 * t;
#pragma unroll
      for (int a = 0; a < C::kD / 32; ++a) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int at = 16 * a + 4 * j + 2 * h;
          word[j] = DTypeTraits<C::kDType>::pack(sum[at] * factor, sum[at + 1] * factor);
        }
        quad_transpose(word);
        if (row < work.sequence.columns && 32 * a + 8 * t < width) {
          *reinterpret_cast<uint4*>(to + 32 * a) = make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }
};

template <class C>
TC_DEVICE void run(const Sm90BackwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = shared_address(memory);
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.grad_out);
    barrier_init(shared + C::kKeysFull, 1);
    for (int i = 0; i < C::kQStages; ++i) {
      barrier_init(shared + C::kQFull + 8 * i, 1);
      barrier_init(shared + C::kQEmpty + 8 * i, C::kGroups);
    }
    for (int i = 0; i < C::kGradStages; ++i) {
      barrier_init(shared + C::kGradFull + 8 * i, 1);
      barrier_init(shared + C::kGradEmpty + 8 * i, C::kGroups);
    }
    for (int i = 0; i < C::kScoreStages; ++i) {
      barrier_init(shared + C::kScoreFull + 8 * i, 4 * C::kGroups);
      barrier_init(shared + C::kScoreEmpty + 8 * i, 4);
    }
    for (int i = 0; i < C::kDqStages * C::kPanels; ++i) {
      barrier_init(shared + C::kDqFull + 8 * i, 4);
      barrier_init(shared + C::kDqEmpty + 8 * i, 1);
    }
    fence_barrier_init();
  }
  wait_for_previous_grid();
  launch_next_grid();
  auto& work = *reinterpret_cast<KeyBlock*>(memory + C::kWork);
  if (threadIdx.x == 32) work = KeyBlock(p, C::kRows);
  __syncthreads();
  if (work.key_tile < 0) return;
  if (warp < 4) {
    fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) load<C>(p, shared, work);
    if (warp > 0 && warp <= C::kDqStages && threadIdx.x % 32 == 0) {
      add_dq<C>(p, shared, work, warp - 1);
    }
    __syncwarp();
  } else {
    int steps = Steps(p, work).count;
    if (warp < 12) {
      more_registers<C::kKeyRegisters>();
      Keys<C>(p, shared, work, warp / 4 - 1).run(steps);
    } else {
      fewer_registers<C::kQueryRegisters>();
      Queries<C>{p, shared}.run(steps);
    }
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  using C =
      BackwardConfig<DType::TC_DTYPE, TC_TILE_M, TC_TILE_K, TC_STAGES, TC_GRAD_STAGES, TC_GENERAL>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kKeys == TC_TILE_N);
  run<C>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_attention_{d.short}_{g.name}{t.name}", "kind": "{g.kind}",
   "archs": ["sm_90a"], "dtype": "{d.dtype}", "math": "{d.dtype}", "layout": "{g.layout}",
   "alignment": 16, "tile": "{t.tile}", "stages": 3, "block": [512, 1, 1],
   "dynamic_shared": "{t.shared}", "cost": "{t.cost}", "accepted_spill": {"sm_90a": "{g.spill}"},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_GRAD_STAGES": 2, "TC_GENERAL": "{g.general}"},
   "for": {
    "d": [{"short": "bf16", "dtype": "bfloat16"}, {"short": "f16", "dtype": "float16"}],
    "g": [{"name": "", "kind": "sm90_backward", "layout": "full", "general": 0, "spill": 16},
          {"name": "general_", "kind": "sm90_backward_general", "layout": "general", "general": 1,
           "spill": 320}],
    "t": [
     {"name": "96x128x64", "tile": [96, 128, 64], "shared": 211456,
      "cost": {"k_tile": 2900, "fixed": 6000}},
     {"name": "48x128x128", "tile": [48, 128, 128], "shared": 210336,
      "cost": {"k_tile": 3000, "fixed": 7000}}]}}]}
*/
