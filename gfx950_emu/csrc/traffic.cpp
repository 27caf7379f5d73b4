// Which 128-byte lines a launch touches, and from which CUs: the bytes that move at each level.
//
// Caches without end that start empty: L1 fetches a line once for its CU, L2 once for its XCD,
// HBM once for the launch. A line that is stored to counts whole. Scope bits change nothing here.
#include "vmem.h"

namespace emu {

constexpr u32 kPageLines = 256;

u64* Traffic::line(const Machine& m, u64 n) {
  if (pages.empty()) {
    words = (m.device.xcds * m.device.cus_per_xcd + 63) / 64;
    pages.resize(m.lines / kPageLines + 1);
  }
  auto& page = pages[n / kPageLines];
  if (!page) page.reset(new u64[(size_t)kPageLines * 2 * words]());
  return page.get() + (n % kPageLines) * 2 * words;
}

void touch_line(Wave& w, u64 n, bool write) {
  Traffic& t = w.launch->traffic;
  u64* line = t.line(*w.machine, n) + (write ? t.words : 0);
  line[w.wg->cu >> 6] |= 1ull << (w.wg->cu & 63);
}

// All lanes' lines lie in region `r`, the first byte at `lo`, the last at `hi`.
void touch_lanes(Wave& w, const Region* r, const u64* addr, u64 lanes, u32 bytes, u64 lo, u64 hi,
                 bool write) {
  u64 first = lo >> 7, base = r->line0 - (r->base >> 7), count = 0;
  if ((hi >> 7) - first < 64) {
    u64 mask = 0;
    for (u64 x = lanes; x; x &= x - 1) {
      u64 a = addr[__builtin_ctzll(x)];
      mask |= 1ull << ((a >> 7) - first) | 1ull << (((a + bytes - 1) >> 7) - first);
    }
    count = __builtin_popcountll(mask);
    for (; mask; mask &= mask - 1) touch_line(w, base + first + __builtin_ctzll(mask), write);
  } else {
    u64 seen[2 * kLanes];
    for (u64 x = lanes; x; x &= x - 1) {
      u64 a = addr[__builtin_ctzll(x)];
      for (u64 n = a >> 7; n <= (a + bytes - 1) >> 7; n++) {
        bool again = false;
        for (u64 k = 0; k < count && !again; k++) again = seen[k] == n;
        if (again) continue;
        seen[count++] = n;
        touch_line(w, base + n, write);
      }
    }
  }
  Counters& c = w.launch->c;
  (write ? c.write_lines_instructions : c.read_lines_instructions) += count;
}

// The sums of a launch that has ended; the map goes.
void count_traffic(const Machine& m, Launch& l) {
  Traffic& t = l.traffic;
  u64 sums[2][3] = {};
  for (auto& page : t.pages) {
    if (!page) continue;
    for (u32 k = 0; k < kPageLines * 2; k++) {
      const u64* bits = page.get() + (size_t)k * t.words;
      u64 cus = 0, xcds = 0;
      for (u32 n = 0; n < t.words; n++) {
        cus += __builtin_popcountll(bits[n]);
        for (u64 x = bits[n]; x; x &= x - 1)
          xcds |= 1ull << ((64 * n + __builtin_ctzll(x)) % m.device.xcds);
      }
      u64* s = sums[k & 1];
      s[0] += cus, s[1] += __builtin_popcountll(xcds), s[2] += cus != 0;
    }
  }
  Counters& c = l.c;
  c.read_lines_l1 += sums[0][0], c.read_lines_l2 += sums[0][1], c.read_lines += sums[0][2];
  c.write_lines_l1 += sums[1][0], c.write_lines_l2 += sums[1][1], c.write_lines += sums[1][2];
  t.pages.clear();
}

}  // namespace emu
