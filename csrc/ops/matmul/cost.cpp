#include "ops/matmul/cost.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

using nlohmann::json;

struct NamedTerm {
  const char* name;
  double Terms::* value;
};

constexpr NamedTerm kTerms[] = {
    {"cycles_per_microsecond", &Terms::cycles_per_microsecond},
    {"memory_bytes_per_microsecond", &Terms::memory_bytes_per_microsecond},
    {"read_again", &Terms::read_again},
    {"l2_bytes_per_cycle", &Terms::l2_bytes_per_cycle},
    {"idle_l2", &Terms::idle_l2},
    {"port_bytes_per_cycle", &Terms::port_bytes_per_cycle},
    {"narrow_cycles", &Terms::narrow_cycles},
    {"launch", &Terms::launch},
    {"cluster_launch", &Terms::cluster_launch},
    {"tile_cycles", &Terms::tile_cycles},
    {"early_cycles", &Terms::early_cycles},
    {"value_cycles", &Terms::value_cycles},
    {"sums_bytes_per_cycle", &Terms::sums_bytes_per_cycle},
    {"handshake", &Terms::handshake},
    {"outside", &Terms::outside},
    {"store_bytes_per_cycle", &Terms::store_bytes_per_cycle},
    {"row_cycles", &Terms::row_cycles},
    {"stretch_cycles", &Terms::stretch_cycles},
    {"lone", &Terms::lone},
    {"inaccurate", &Terms::inaccurate},
};
static_assert(sizeof(Terms) == std::size(kTerms) * sizeof(double), "every number has its name");

constexpr struct {
  const char* gpu;
  const char* what;
  double logarithm;
} kCorrections[] = {
#include "ops/matmul/cost_corrections.h"
};

// The fourth root of the sum of fourth powers: two bounds that are near one another both cost. Made
// of square roots, which are instructions: std::pow would need a newer glibc than 2.28.
double smooth_max(double x, double y, double z = 0) {
  const double x2 = x * x, y2 = y * y, z2 = z * z;
  return std::sqrt(std::sqrt(x2 * x2 + y2 * y2 + z2 * z2));
}

// What a block waits for its threads' stores: of each tile but the last, what the next one's
// products do not hide.
double store_cycles(const Work& w, const Terms& t, double cycles) {
  if (w.store_bytes == 0) return 0;
  const double stored = w.store_bytes / t.store_bytes_per_cycle, tile = cycles / w.tiles;
  const double hidden = tile * (w.store_groups - 1) / w.store_groups;
  return (w.tiles - 1) * std::max(0.0, stored - hidden) + std::max(0.0, stored - tile);
}

// What of the tiles' own cycles other tiles' products hide. Two warpgroups take tiles in turns, and
// one stores while the other one multiplies. Where storing takes longer, every second tile waits
// for it, and two warpgroups that store at once slow one another.
double hidden_cycles(const Work& w, const Terms& t, double products) {
  if (w.hidden == 0) return 0;
  const double results = (w.values * t.value_cycles + w.activations) / w.tiles;
  const double own = t.tile_cycles + results;
  // The loads that start ahead are counted apart.
  const double hidden = w.hidden * (w.ahead > 0 ? results : own);
  const double spared = w.ahead > 0 ? t.early_cycles : 0;
  const double waiting = std::floor(w.hidden / 2) * (own - spared - products / w.tiles);
  return hidden - std::max({0.0, waiting, (hidden - products) / 2});
}

}  // namespace

json numbers_of(const Terms& terms) {
  json named;
  for (const NamedTerm& term : kTerms) named[term.name] = terms.*term.value;
  return named;
}

Terms changed_terms(Terms terms, const json& values) {
  for (const auto& [name, value] : values.items()) {
    const auto found = std::find_if(std::begin(kTerms), std::end(kTerms),
                                    [&](const NamedTerm& term) { return name == term.name; });
    if (found == std::end(kTerms) || !value.is_number()) {
      fail({"input", "a term of the planner", "is not known", "a number by a name of cost.h",
            printable(name), ""});
    }
    terms.*found->value = value.get<double>();
  }
  return terms;
}

double microseconds(const Work& w, const Terms& t) {
  const double l2 = w.l2_bytes / t.l2_bytes_per_cycle * (1 - t.idle_l2 * (1 - w.filled));
  const double tiles = smooth_max(w.multiply, w.shared, l2);
  const double port = 2 * w.port_bytes / t.port_bytes_per_cycle;
  // Of squares, so of eighth powers: the port is a harder bound than those of the tiles.
  double cycles = std::max(std::sqrt(smooth_max(tiles * tiles, port * port)),
                           w.once_bytes / t.port_bytes_per_cycle);
  cycles += w.narrow * t.narrow_cycles;
  const double block = w.rows * t.row_cycles + w.stretches * t.stretch_cycles;
  cycles += store_cycles(w, t, cycles) - hidden_cycles(w, t, cycles) +
            (w.tiles + w.waits) * t.tile_cycles - (w.ahead + (w.early ? 1 : 0)) * t.early_cycles +
            w.values * t.value_cycles + w.activations + w.sums_bytes / t.sums_bytes_per_cycle +
            w.threads + block * (1 + (w.blocks - 1) * t.lone);
  const double compute = cycles / t.cycles_per_microsecond + w.handshakes * t.handshake;
  const double memory = (w.bytes + t.read_again * w.bytes_again) / t.memory_bytes_per_microsecond;
  // exp() of a small number; std::exp would need a newer glibc than 2.28.
  const double logarithm = w.correction + (w.inaccurate ? t.inaccurate : 0);
  const double factor = 1 + logarithm + logarithm * logarithm / 2;
  // Rows and columns outside, which the TMA fills with zeros, cost memory-bound products, too.
  return factor * (1 + t.outside * w.outside) * smooth_max(compute, memory) +
         (w.follows ? 0 : t.launch + (w.clusters ? t.cluster_launch : 0)) +
         w.beside_bytes / t.memory_bytes_per_microsecond +
         w.beside_cycles / t.cycles_per_microsecond;
}

Terms terms_of(const Device& device) {
  Terms terms;
  terms.cycles_per_microsecond = device.cycles_per_microsecond;
  terms.memory_bytes_per_microsecond = device.bytes_per_cycle * device.cycles_per_microsecond;
  return terms;
}

double Corrections::of(const std::string& what) const {
  for (const auto& each : kCorrections) {
    if (gpu_ == each.gpu && what == each.what) return each.logarithm;
  }
  return 0;
}

}  // namespace torch_cubin
