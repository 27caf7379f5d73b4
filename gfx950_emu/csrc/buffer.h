// Buffer descriptors: where a lane's bytes lie, and whether they are in range.
#pragma once
#include "vmem.h"

namespace emu {

// The descriptor's words; with add-tid the data format field is bits 14-17 of the stride.
struct Buffer {
  u64 base;
  u32 stride, records, index_stride, number_format, data_format, select;
  bool swizzle, add_tid;
  Buffer(Wave& w, int s);
};

// One instruction's view of its buffer. A record is `stride` bytes. A lane's offset in the buffer is
// index * stride + offset; swizzled buffers interleave the records of `index_stride` lanes by 4-byte
// elements:
//   ((index / is) * stride + (offset / 4) * 4) * is + (index % is) * 4 + offset % 4.
// In range: with an index the record's number is below `records` (and, swizzled, the offset within
// the record); otherwise the last byte, soffset included, is below `records` bytes.
struct BufferAccess {
  Buffer b;
  u32 soffset;
  i32 immediate;
  const u32 *index = nullptr, *offset = nullptr;  // copies: a load may overwrite its address
  BufferAccess(Wave&, const Inst&);  // reports undefined addresses
  BufferAccess(const BufferAccess&) = delete;
  bool swizzled() const { return b.swizzle && b.stride; }
  bool structured() const { return b.stride && (index || b.add_tid); }
  u32 record(int l) const { return (index ? index[l] : 0) + (b.add_tid ? (u32)l : 0); }
  u64 within(int l) const { return (u64)(u32)immediate + (offset ? offset[l] : 0); }
  u64 place(int l, u32 extra) const;
  bool in_range(int l, u32 extra, u32 bytes) const;
  // Addresses of `bytes` at `extra` past each lane's place; lanes out of range are left out.
  Address part(Wave&, u32 extra, u32 bytes) const;

 private:
  Lanes index_copy, offset_copy;
};

}  // namespace emu
