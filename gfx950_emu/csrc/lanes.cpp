#include "lanes.h"

namespace emu {

const u32* Wave::mask_lanes(u64 mask) {
  if (mask != lane_mask_of) {
    for (int l = 0; l < kLanes; l++) lane_mask[l] = (mask >> l & 1) ? ~0u : 0;
    lane_mask_of = mask;
  }
  return lane_mask;
}

u32 read_special(Wave& w, u16 which) {
  switch (which) {
    case SP_SCC: return w.scc;
    case SP_VCCZ: return w.vcc() == 0;
    case SP_EXECZ: return w.exec() == 0;
    case SP_SHARED_LIMIT:
    case SP_PRIVATE_LIMIT: return 0xffffffff;
    default: return 0;
  }
}

u32 read_scalar(Wave& w, const Operand& o) {
  switch (o.kind) {
    case K_SGPR: return w.s[o.reg];
    case K_CONST: return (u32)o.lit;
    case K_SPECIAL: return read_special(w, o.reg);
    default: return 0;
  }
}

u64 read_scalar64(Wave& w, const Operand& o) {
  switch (o.kind) {
    case K_SGPR: return join(w.s[o.reg], w.s[o.reg + 1]);
    case K_CONST: return o.lit;
    case K_SPECIAL:
      if (o.reg == SP_SHARED_BASE) return kSharedAperture;
      if (o.reg == SP_PRIVATE_BASE) return kPrivateAperture;
      return read_special(w, o.reg);
    default: return 0;
  }
}

void write_scalar(Wave& w, int reg, u32 value) {
  w.s[reg] = value;
  w.sundef[reg] = 0;
}

void write_scalar64(Wave& w, int reg, u64 value) {
  write_scalar(w, reg, (u32)value);
  write_scalar(w, reg + 1, (u32)(value >> 32));
}

namespace {

// Source lane of `l`, or -1.
int dpp_source(const Inst& i, int l) {
  int row = l & ~15, in = l & 15, n = i.dpp_arg;
  switch (i.dpp) {
    case DPP_QUAD_PERM: return (l & ~3) | (n >> (2 * (l & 3)) & 3);
    case DPP_ROW_SHL: return in + n < 16 ? l + n : -1;
    case DPP_ROW_SHR: return in - n >= 0 ? l - n : -1;
    case DPP_ROW_ROR: return row | ((in - n) & 15);
    case DPP_WAVE_SHL: return l + 1 < kLanes ? l + 1 : -1;
    case DPP_WAVE_ROL: return (l + 1) & 63;
    case DPP_WAVE_SHR: return l - 1;
    case DPP_WAVE_ROR: return (l - 1) & 63;
    case DPP_ROW_MIRROR: return row | (15 - in);
    case DPP_ROW_HALF_MIRROR: return (l & ~7) | (7 - (l & 7));
    case DPP_ROW_BCAST15: return row ? row - 1 : -1;
    case DPP_ROW_BCAST31: return l >= 32 ? 31 : -1;
    case DPP_ROW_NEWBCAST: return row | n;
    default: return l;
  }
}

u32 select(u32 x, u8 sel, bool sext) {
  switch (sel) {
    case SEL_BYTE0: case SEL_BYTE1: case SEL_BYTE2: case SEL_BYTE3: {
      u32 b = x >> (8 * sel) & 0xff;
      return sext ? (u32)(i32)(i8)b : b;
    }
    case SEL_WORD0: case SEL_WORD1: {
      u32 h = x >> (sel == SEL_WORD1 ? 16 : 0) & 0xffff;
      return sext ? (u32)(i32)(i16)h : h;
    }
    default: return x;
  }
}

u32 sign_bit_of(u8 type, int part) {
  switch (type) {
    case T_F16: case T_BF16: return 0x8000;
    case T_F64: return part == 1 ? 0x80000000 : 0;
    default: return 0x80000000;
  }
}

}  // namespace

const u32* fetch_slow(Wave& w, const Inst& i, int k, int part, Lanes& tmp) {
  const Operand& o = i.src[k];
  if (o.kind == K_VGPR) {
    const u32* r = w.reg(o.reg + part);
    bool dpp = (i.flags & F_DPP) && k == 0;
    if (!dpp && !o.mods && o.sel == SEL_DWORD) return r;
    if (dpp) {
      u64 exec = w.exec(), write = w.wmask;
      for (int l = 0; l < kLanes; l++) {
        int from = dpp_source(i, l);
        bool ok = from >= 0 && (exec >> from & 1);
        bool on = (i.row_mask >> (l >> 4) & 1) && (i.bank_mask >> (l >> 2 & 3) & 1);
        tmp.x[l] = ok ? r[from] : 0;
        if (!on || (!ok && !(i.flags & F_BOUND_CTRL))) write &= ~(1ull << l);
      }
      w.wmask = write;
    } else {
      memcpy(tmp.x, r, sizeof tmp.x);
    }
  } else {
    u32 x = part == 0 || o.width == 2 ? (u32)(read_scalar64(w, o) >> (32 * part)) : 0;
    if (o.kind != K_CONST && part == 0) x = o.width == 2 ? x : read_scalar(w, o);
    for (int l = 0; l < kLanes; l++) tmp.x[l] = x;
  }
  if (o.sel != SEL_DWORD) {
    bool sext = o.mods & M_SEXT;
    for (int l = 0; l < kLanes; l++) tmp.x[l] = select(tmp.x[l], o.sel, sext);
  }
  if (o.mods & (M_ABS | M_NEG)) {
    u32 s = sign_bit_of(o.type, part);
    u32 clear = o.mods & M_ABS ? ~s : ~0u, flip = o.mods & M_NEG ? s : 0;
    // Halves chosen by op_sel: both carry the modifier.
    if ((o.type == T_F16 || o.type == T_BF16) && o.sel == SEL_DWORD) {
      clear &= o.mods & M_ABS ? 0x7fffffff : ~0u;
      flip |= o.mods & M_NEG ? 0x80000000 : 0;
    }
    for (int l = 0; l < kLanes; l++) tmp.x[l] = (tmp.x[l] & clear) ^ flip;
  }
  return tmp.x;
}

u64 dpp_undef(Wave& w, const Inst& i, u64 undef) {
  u64 out = 0;
  for (int l = 0; l < kLanes; l++) {
    int from = dpp_source(i, l);
    if (from >= 0) out |= (undef >> from & w.exec() >> from & 1) << l;
  }
  return out;
}

const u32* fetch16(Wave& w, const Inst& i, int k, Lanes& tmp) {
  const u32* r = fetch(w, i, k, tmp);
  int shift = (i.op_sel >> k & 1) ? 16 : 0;
  for (int l = 0; l < kLanes; l++) tmp.x[l] = r[l] >> shift & 0xffff;
  return tmp.x;
}

void commit_slow(Wave& w, const Inst& i, Lanes& out) {
  const Operand& d = i.dst[0];
  if (d.type == T_F32 && (i.omod || (i.flags & F_CLAMP))) {
    const FloatMode m(w);
    // Hardware ignores omod in IEEE mode and when result denormals are kept; it has no -0.
    bool scale = i.omod && !m.ieee && !m.out32;
    for (int l = 0; l < kLanes; l++) {
      float x = f32(out.x[l]);
      if (scale) {
        x *= omod_factor(i.omod);
        if (std::fabs(x) < 0x1p-126f) x = 0;
      }
      out.x[l] = bits(i.flags & F_CLAMP ? m.clamp(x) : x);
    }
  }
  if ((i.flags & F_SDWA) && i.dst_sel != SEL_DWORD) {
    bool word = i.dst_sel >= SEL_WORD0;
    int shift = word ? (i.dst_sel == SEL_WORD1 ? 16 : 0) : 8 * i.dst_sel;
    u32 field = (word ? 0xffffu : 0xffu) << shift;
    const u32* old = w.reg(d.reg);
    for (int l = 0; l < kLanes; l++) {
      u32 v = out.x[l] << shift & field, rest = 0;
      if (i.dst_unused == 2) rest = old[l] & ~field;
      if (i.dst_unused == 1) {
        bool neg = v >> (shift + (word ? 15 : 7)) & 1;
        rest = neg ? ~(field | ((1u << shift) - 1)) : 0;
      }
      out.x[l] = v | rest;
    }
  }
}

void commit(Wave& w, const Inst& i, const u32* out, int part) {
  if (i.flags & F_SLOW_OUT) {
    Lanes t;
    memcpy(t.x, out, sizeof t.x);
    commit_slow(w, i, t);
    put(w, i.dst[0].reg + part, t.x);
    return;
  }
  put(w, i.dst[0].reg + part, out);
}

void commit16(Wave& w, const Inst& i, const u32* out, bool keep) {
  Lanes t;
  for (int l = 0; l < kLanes; l++) t.x[l] = out[l] & 0xffff;
  if (i.dst[0].type == T_F16 && (i.omod || (i.flags & F_CLAMP))) {
    const FloatMode m(w);
    bool scale = i.omod && !m.ieee && !m.out16;
    for (int l = 0; l < kLanes; l++) {
      float x = f16_to_f32(t.x[l]), y = x;
      if (scale) {
        x *= omod_factor(i.omod);
        if (std::fabs(x) < 0x1p-14f) x = 0;
      }
      if (i.flags & F_CLAMP) x = m.clamp(x);
      t.x[l] = m.result16(f32_to_f16(x), std::isfinite(y));
    }
  }
  const u32* old = w.reg(i.dst[0].reg);
  if (i.op_sel & 8)  // the high half, the low one stays
    for (int l = 0; l < kLanes; l++) t.x[l] = t.x[l] << 16 | (old[l] & 0xffff);
  else if (keep)
    for (int l = 0; l < kLanes; l++) t.x[l] |= old[l] & 0xffff0000;
  if (i.flags & F_SDWA) commit_slow(w, i, t);
  put(w, i.dst[0].reg, t.x);
}

}  // namespace emu
