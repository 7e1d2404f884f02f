// csrc/cuda/pack_rows.cuh run by an emulated block, behind the C interface of pack_rows.cu.
#define GDN_WARP_EMULATION
#include "pack_rows.cuh"

extern "C" {

int pack_rows_argument_bytes() { return sizeof(pack::Arguments); }

int pack_rows_launch(const pack::Arguments* arguments, int, void*) {
  static pack::Shared shared;
  std::memset(&shared, 0x55, sizeof shared);
  const int threads = (arguments->requests + 31) / 32 * 32;
  if (arguments->positions <= 8)
    warp::run([&] { pack::pack_rows<float, 8>(*arguments, shared); }, threads);
  else
    warp::run([&] { pack::pack_rows<float, 16>(*arguments, shared); }, threads);
  return 0;
}

}  // extern "C"
