"""The Warp kernels of `cell_list`: sequential programs, each launched with one thread on the CPU.

So a running cursor needs neither atomics nor a second pass, and the order of all they find follows from their input.
"""

# Warp's own types are values to mypy, and its vectors know no index.
# mypy: disable-error-code="valid-type, call-overload, index, assignment, arg-type, empty-body"
# No `from __future__ import annotations`: Warp must see the types, not their names.
import warp as wp

wp.set_module_options({"enable_backward": False})

# Rows of `frame`: lattice vectors, their duals, and within which fractional and Cartesian bounds images are written.
_BOX, _DUAL, _LOW, _HIGH, _FROM, _TO = (wp.constant(k) for k in (0, 3, 6, 7, 8, 9))
# Rows of `found`: fractional and Cartesian bounds of the receivers, fractional bounds of all; (bad points, first, -).
_F_LOW, _F_HIGH, _X_LOW, _X_HIGH, _ALL_LOW, _ALL_HIGH, _BAD = (wp.constant(k) for k in range(7))


@wp.func
def _fractional(x: wp.vec3d, frame: wp.array(dtype=wp.vec3d)) -> wp.vec3d:
    return wp.vec3d(wp.dot(x, frame[_DUAL]), wp.dot(x, frame[_DUAL + 1]), wp.dot(x, frame[_DUAL + 2]))


@wp.kernel
def survey(
    points: wp.array(dtype=wp.vec3d),
    receives: wp.array(dtype=wp.uint8),
    frame: wp.array(dtype=wp.vec3d),
    found: wp.array(dtype=wp.vec3d),
):
    """Bounds of the points, and how many of them are not finite."""
    f_low = found[_F_LOW]
    f_high = found[_F_HIGH]
    x_low = found[_X_LOW]
    x_high = found[_X_HIGH]
    all_low = found[_ALL_LOW]
    all_high = found[_ALL_HIGH]
    bad = wp.int32(0)
    first = wp.int32(-1)
    for i in range(points.shape[0]):
        x = points[i]
        if wp.isfinite(x[0]) and wp.isfinite(x[1]) and wp.isfinite(x[2]):
            f = _fractional(x, frame)
            all_low = wp.min(all_low, f)
            all_high = wp.max(all_high, f)
            if receives[i] != wp.uint8(0):
                f_low = wp.min(f_low, f)
                f_high = wp.max(f_high, f)
                x_low = wp.min(x_low, x)
                x_high = wp.max(x_high, x)
        else:
            bad += 1
            if first < 0:
                first = i
    found[_F_LOW] = f_low
    found[_F_HIGH] = f_high
    found[_X_LOW] = x_low
    found[_X_HIGH] = x_high
    found[_ALL_LOW] = all_low
    found[_ALL_HIGH] = all_high
    found[_BAD] = wp.vec3d(wp.float64(bad), wp.float64(first), wp.float64(0.0))


@wp.kernel
def write_images(
    points: wp.array(dtype=wp.vec3d),
    n_half: int,
    frame: wp.array(dtype=wp.vec3d),
    rows: wp.array(dtype=wp.vec3d),
    image_of: wp.array(dtype=wp.int32),
    image_shift: wp.array2d(dtype=wp.int32),
    sizes: wp.array(dtype=wp.int64),
):
    """The points, then their images within the bounds, by (point, shift), into `rows`; sizes[0]: the images.

    Of the first n_half points only the images with a lexicographically positive shift.
    """
    n = points.shape[0]
    b0 = frame[_BOX]
    b1 = frame[_BOX + 1]
    b2 = frame[_BOX + 2]
    low = frame[_LOW]
    high = frame[_HIGH]
    x_from = frame[_FROM]
    x_to = frame[_TO]
    m = wp.int32(0)
    for j in range(n):
        x = points[j]
        rows[j] = x
        f = _fractional(x, frame)
        start0 = int(wp.ceil(low[0] - f[0]))
        half = j < n_half
        if half:
            start0 = wp.max(start0, 0)
        for s0 in range(start0, int(wp.floor(high[0] - f[0])) + 1):
            x0 = x + wp.float64(s0) * b0
            start1 = int(wp.ceil(low[1] - f[1]))
            if half and s0 == 0:
                start1 = wp.max(start1, 0)
            for s1 in range(start1, int(wp.floor(high[1] - f[1])) + 1):
                x1 = x0 + wp.float64(s1) * b1
                start2 = int(wp.ceil(low[2] - f[2]))
                if half and s0 == 0 and s1 == 0:
                    start2 = wp.max(start2, 1)
                for s2 in range(start2, int(wp.floor(high[2] - f[2])) + 1):
                    y = x1 + wp.float64(s2) * b2
                    inside = y[0] >= x_from[0] and y[1] >= x_from[1] and y[2] >= x_from[2]
                    inside = inside and y[0] <= x_to[0] and y[1] <= x_to[1] and y[2] <= x_to[2]
                    if inside and (s0 != 0 or s1 != 0 or s2 != 0):
                        rows[n + m] = y
                        image_of[m] = j
                        image_shift[m, 0] = s0
                        image_shift[m, 1] = s1
                        image_shift[m, 2] = s2
                        m += 1
    sizes[0] = wp.int64(m)


@wp.kernel
def sort_into_bins(
    rows: wp.array(dtype=wp.vec3d),
    n_half: int,
    grid: wp.array(dtype=wp.vec3d),
    shape: wp.array(dtype=wp.int32),
    bin_of: wp.array(dtype=wp.int32),
    start: wp.array(dtype=wp.int32),
    places: wp.array(dtype=wp.vec3d),
    row_at: wp.array(dtype=wp.int32),
    slot_of: wp.array(dtype=wp.int32),
):
    """Counting sort: the first n_half rows into bins 0..bins-1, the others into bins..2*bins-1, those outside nowhere.

    Bin b is then slots start[b]:start[b+1] of `places` and `row_at`, rows ascending. `start`, (2*bins+2,), comes zero.
    """
    origin = grid[0]
    per = grid[1]
    n0 = shape[0]
    n1 = shape[1]
    bins = n0 * n1 * shape[2]
    most = wp.vec3d(wp.float64(n0), wp.float64(n1), wp.float64(shape[2]))
    zero = wp.float64(0.0)
    n = rows.shape[0]
    for i in range(n):
        u = wp.cw_mul(rows[i] - origin, per)
        b = wp.int32(-1)
        # Compared before they are integers: a far row's bin need not fit into one.
        inside = u[0] >= zero and u[1] >= zero and u[2] >= zero
        if inside and u[0] < most[0] and u[1] < most[1] and u[2] < most[2]:
            b = (int(u[2]) * n1 + int(u[1])) * n0 + int(u[0])
            if i >= n_half:
                b += bins
            start[b + 2] += 1
        bin_of[i] = b
    for b in range(2, 2 * bins + 2):
        start[b] += start[b - 1]
    # start[b + 1] is where bin b begins; once all its rows are placed, where it ends.
    for i in range(n):
        b = bin_of[i]
        if b >= 0:
            slot = start[b + 1]
            start[b + 1] = slot + 1
            places[slot] = rows[i]
            row_at[slot] = i
            if i < n_half:
                slot_of[i] = slot


# In C++ because the loop takes half as long over bare pointers: Warp reads an array's strides anew after every store.
# Rows are written always and kept by a sum: a branch would be mispredicted every other time.
@wp.func_native("""
    const wp::vec_t<3, wp::float64>* place = places.data;
    const wp::int32* row = row_at.data;
    const wp::float64 x = here[0], y = here[1], z = here[2];
    wp::int64 n = cursor;
    if (n + end - begin <= neighbors.shape[0]) {
        wp::int32* out = neighbors.data;
        for (wp::int32 k = begin; k < end; ++k) {
            const wp::float64 dx = place[k][0] - x, dy = place[k][1] - y, dz = place[k][2] - z;
            const wp::int32 j = row[k];
            out[n] = j;
            n += (dx * dx + dy * dy + dz * dz < reach2) & (j != i);
        }
    } else {
        // No room left: only counted, so that the second try has enough.
        for (wp::int32 k = begin; k < end; ++k) {
            const wp::float64 dx = place[k][0] - x, dy = place[k][1] - y, dz = place[k][2] - z;
            n += (dx * dx + dy * dy + dz * dz < reach2) & (row[k] != i);
        }
    }
    return n;
""")
def _take(
    here: wp.vec3d,
    i: int,
    begin: int,
    end: int,
    reach2: wp.float64,
    places: wp.array(dtype=wp.vec3d),
    row_at: wp.array(dtype=wp.int32),
    neighbors: wp.array(dtype=wp.int32),
    cursor: wp.int64,
) -> wp.int64:
    """Append what lies within reach in slots begin:end, but row i, to neighbors[cursor:]; returns the new cursor."""


@wp.func
def _outside(u: wp.float64, b: int) -> wp.float64:
    """How far a coordinate, in bins, lies outside bin b."""
    return wp.max(wp.max(wp.float64(b) - u, u - wp.float64(b + 1)), wp.float64(0.0))


@wp.kernel
def search(
    rows: wp.array(dtype=wp.vec3d),
    receives: wp.array(dtype=wp.uint8),
    n_half: int,
    n_owned: int,
    reach: wp.float64,
    grid: wp.array(dtype=wp.vec3d),
    shape: wp.array(dtype=wp.int32),
    start: wp.array(dtype=wp.int32),
    places: wp.array(dtype=wp.vec3d),
    row_at: wp.array(dtype=wp.int32),
    slot_of: wp.array(dtype=wp.int32),
    image_of: wp.array(dtype=wp.int32),
    number: wp.array(dtype=wp.int32),
    used: wp.array(dtype=wp.int32),
    first: wp.array(dtype=wp.int32),
    count: wp.array(dtype=wp.int32),
    boundary: wp.array(dtype=wp.uint8),
    neighbors: wp.array(dtype=wp.int32),
    sizes: wp.array(dtype=wp.int64),
):
    """The list of every receiver; sizes[1]: pairs, sizes[2]: images used.

    A receiver among the first n_half rows meets those of them that come after it (in the order of the bins), then
    every other row. Images are numbered as they are met: used[k] is the k-th, number[g] its inverse, -1 to begin with.
    `neighbors` needs room for len(rows) more than there are pairs; if it was shorter, only sizes[1] is of use.
    """
    n = receives.shape[0]
    origin = grid[0]
    per = grid[1]
    width = grid[2]
    wide = grid[3][0]
    n0 = shape[0]
    n1 = shape[1]
    bins = n0 * n1 * shape[2]
    reach2 = reach * reach
    zero = wp.float64(0.0)
    last = wp.vec3d(wp.float64(n0 - 1), wp.float64(n1 - 1), wp.float64(shape[2] - 1))
    cursor = wp.int64(0)
    images = wp.int32(0)
    for i in range(n):
        begin = cursor
        others = cursor
        if receives[i] != wp.uint8(0):
            here = rows[i]
            u = wp.cw_mul(here - origin, per)
            extent = wide * per
            low = wp.max(u - extent, wp.vec3d())
            high = wp.min(u + extent, last)
            # Two rounds: the own half over the rows after this one, then all others.
            for whole in range(wp.where(i < n_half, 0, 1), 2):
                others = cursor
                z_from = wp.where(whole == 1, int(low[2]), int(u[2]))
                for z in range(z_from, int(high[2]) + 1):
                    ahead = whole == 1 or z > int(u[2])
                    y_from = wp.where(ahead, int(low[1]), int(u[1]))
                    for y in range(y_from, int(high[1]) + 1):
                        line = whole * bins + (z * n1 + y) * n0
                        dy = _outside(u[1], y) * width[1]
                        dz = _outside(u[2], z) * width[2]
                        rest = wide * wide - dy * dy - dz * dz
                        if start[line] < start[line + n0] and rest > zero:
                            chord = wp.sqrt(rest) * per[0]
                            slot = start[line + int(wp.max(u[0] - chord, zero))]
                            if not ahead and y == int(u[1]):
                                slot = slot_of[i] + 1
                            end = start[line + int(wp.min(u[0] + chord, last[0])) + 1]
                            cursor = _take(here, i, slot, end, reach2, places, row_at, neighbors, cursor)
            if cursor + wp.int64(rows.shape[0]) <= wp.int64(neighbors.shape[0]):
                foreign = wp.int32(0)
                for k in range(int(others), int(cursor)):
                    node = neighbors[k]
                    if node >= n:
                        g = node - n
                        node = image_of[g]
                        if number[g] < 0:
                            number[g] = images
                            used[images] = g
                            images += 1
                        neighbors[k] = n + number[g]
                    if node >= n_owned:
                        foreign = 1
                if i < n_owned:
                    boundary[i] = wp.uint8(foreign)
        first[i] = int(begin)
        count[i] = int(cursor - begin)
    sizes[1] = cursor
    sizes[2] = wp.int64(images)
