// A step by blocks that stay: in each, one warp copies states into a ring of stages, and v and
// pending updates into another, some solve small systems ahead, and eight multiply. Those never read
// device memory: a trip there takes a microsecond, and a head may not take more than one and a third.
//
// No order of turns makes it hang. Heads are taken in one order by all warps, and a place of a ring is
// filled once what filled it before has been let go, which was of an earlier head. So whatever the
// earliest head that is not done waits for can be filled: those before it are done.
#pragma once

#include "gdn_copies.cuh"
#include "gdn_multipliers.cuh"
#include "gdn_solvers.cuh"

namespace gdn {

template <bool kWide, typename Shared>
WARP_FN void run_pipeline(const Arguments& x, Shared& shared) {
  if (warp::thread() == 0) shared.make_barriers();
  const int role = warp::thread() / 32, system = role - kTileWarps;
  // Warps that ask for requests first come here behind that.
  if (!Shared::kSystemsFirst || system < 0) warp::block_sync();
  if (system < 0)
    TileWarp<kWide, Shared>(x, shared, role).run();
  else if (system < Shared::kSystemWarps)
    solve_systems<kWide>(x, shared, system);
  else
    copy_heads<kWide>(x, shared);
}

}  // namespace gdn
