"""Code that transposes vectors of sixteen 32-bit lanes."""

from llvmlite import ir

from kernels.cpu.codes import WIDTH


def _indices(places):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


def transposed(builder, rows):
    """Sixteen vectors, transposed in four rounds of exchanges between rows (a butterfly)."""
    rows = list(rows)
    for distance in (8, 4, 2, 1):
        for i in range(WIDTH):
            if i & distance:
                continue
            a, b = rows[i], rows[i | distance]
            low = [lane if not lane & distance else WIDTH + (lane ^ distance) for lane in range(WIDTH)]
            high = [WIDTH + lane if lane & distance else lane ^ distance for lane in range(WIDTH)]
            rows[i] = builder.shuffle_vector(a, b, _indices(low))
            rows[i | distance] = builder.shuffle_vector(a, b, _indices(high))
    return rows


def transposed_quarters(builder, rows):
    """Four vectors whose quarters of four lanes are 4 x 4 matrices: each matrix is transposed."""

    def pick(x, y, places):  # from each quarter
        return builder.shuffle_vector(x, y, _indices([4 * quarter + i for quarter in range(4) for i in places]))

    a, b, c, d = rows
    low, high = (0, WIDTH, 1, WIDTH + 1), (2, WIDTH + 2, 3, WIDTH + 3)
    firsts, lasts = [pick(a, b, half) for half in (low, high)], [pick(c, d, half) for half in (low, high)]
    halves = (0, 1, WIDTH, WIDTH + 1), (2, 3, WIDTH + 2, WIDTH + 3)
    return [pick(firsts[i // 2], lasts[i // 2], halves[i % 2]) for i in range(4)]
