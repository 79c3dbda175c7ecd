//! Matrix products in every form.

use super::*;

#[derive(Clone, Copy, Debug)]
pub(super) struct ProductCase {
    m: usize,
    n: usize,
    k: usize,
    a_transposed: bool,
    b_transposed: bool,
    bias: bool,
    residual: bool,
    accumulate: bool,
    apart: bool,
}

/// Operands and the initial contents of the output.
pub(super) struct Numbers<T, O> {
    a: Vec<T>,
    b: Vec<T>,
    bias: Vec<T>,
    residual: Vec<T>,
    out: Vec<O>,
}

impl ProductCase {
    /// Returns the row stride of a matrix: that of a part of a matrix wider `by` columns if the case asks for it, else
    /// `columns`.
    fn row(&self, columns: usize, by: usize) -> usize {
        if self.apart { columns + by } else { columns }
    }

    fn a_row(&self) -> usize {
        if self.a_transposed { self.row(self.m, 3) } else { self.row(self.k, 3) }
    }

    fn out_row(&self) -> usize {
        self.row(self.n, 5)
    }

    fn scale(&self) -> f64 {
        if self.apart { -0.75 } else { 1.0 }
    }

    pub(super) fn draw<T: Real, O: Real>(&self, draw: &mut Draw) -> Numbers<T, O> {
        let ProductCase { m, n, k, .. } = *self;
        let a_rows = if self.a_transposed { k } else { m };
        let (a, b) = (draw.many(a_rows * self.a_row()), draw.many(k * n));
        let (bias, residual) = (draw.many(n), draw.many(m * n));
        Numbers { a, b, bias, residual, out: draw.many(m * self.out_row()) }
    }

    fn has_residual(&self) -> bool {
        self.residual && !self.apart
    }

    /// Returns the expected result, computed by plain loops.
    pub(super) fn want<T: Real, O: Real>(&self, numbers: &Numbers<T, O>) -> Vec<f64> {
        let ProductCase { m, n, k, .. } = *self;
        let (a, b, a_row, out_row) = (to_f64s(&numbers.a), to_f64s(&numbers.b), self.a_row(), self.out_row());
        let columns: Vec<f64> = match self.b_transposed {
            true => b,
            false => (0..n).flat_map(|j| (0..k).map(move |p| p * n + j)).map(|at| b[at]).collect(),
        };
        // Elements between the rows keep their values.
        let mut want = to_f64s(&numbers.out);
        for i in 0..m {
            let row: Vec<f64> =
                (0..k).map(|p| a[if self.a_transposed { p * a_row + i } else { i * a_row + p }]).collect();
            for j in 0..n {
                let mut sum = dot(&row, &columns[j * k..(j + 1) * k]);
                sum *= self.scale();
                sum += if self.bias { numbers.bias[j].to_f64() } else { 0.0 };
                sum += if self.has_residual() { numbers.residual[i * n + j].to_f64() } else { 0.0 };
                sum += if self.accumulate { want[i * out_row + j] } else { 0.0 };
                want[i * out_row + j] = sum;
            }
        }
        want
    }

    /// Returns the kernel's result.
    pub(super) fn got<T: Multiply, O: Real<Wide = T::Wide>>(&self, threads: usize, numbers: Numbers<T, O>) -> Vec<O> {
        let ProductCase { m, n, k, .. } = *self;
        let Numbers { a, b, bias, residual, mut out } = numbers;
        let product_of = Product {
            a_transposed: self.a_transposed,
            b_transposed: self.b_transposed,
            bias: self.bias.then_some(&bias[..]),
            residual: self.has_residual().then_some(&residual[..]),
            accumulate: self.accumulate,
            a_row: self.a_row(),
            out_row: self.out_row(),
            scale: T::Wide::from_f64(self.scale()),
            ..Product::new(m, n, k, &a, &b)
        };
        let size = Kernels::Cpu { threads: threads as u64 }.product_workspace(T::DTYPE, m as u64, n as u64, k as u64);
        product(&pool(threads), product_of, &mut out, &mut scratch(size));
        out
    }
}

/// Runs a product with random operands. Returns the kernel's result, of type O, and the expected one.
fn run_product<T: Multiply, O: Real<Wide = T::Wide>>(
    threads: usize,
    case: ProductCase,
    draw: &mut Draw,
) -> (Vec<O>, Vec<f64>) {
    let numbers = case.draw::<T, O>(draw);
    let want = case.want(&numbers);
    (case.got(threads, numbers), want)
}

pub(super) fn case_from_flags(m: usize, n: usize, k: usize, bits: usize) -> ProductCase {
    let bit = |i: usize| bits >> i & 1 == 1;
    ProductCase {
        m,
        n,
        k,
        a_transposed: bit(0),
        b_transposed: bit(1),
        bias: bit(2),
        residual: bit(3),
        accumulate: bit(4),
        apart: bit(5),
    }
}

#[test]
fn products_match_references_in_every_form() {
    let mut draw = Draw(1);
    for (m, n, k) in [(1, 1, 1), (1, 70, 33), (3, 65, 17), (4, 9, 130), (5, 131, 40), (13, 64, 8), (98, 67, 23)] {
        for bits in 0..64 {
            let case = case_from_flags(m, n, k, bits);
            let (got, want) = run_product::<f32, f32>(2, case, &mut draw);
            assert_close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
            let (got, want) = run_product::<f64, f64>(2, case, &mut draw);
            assert_close(&got, &want, tolerance::<f64>(k), &format!("{case:?}"));
            let (got, want) = run_product::<bf16, bf16>(2, case, &mut draw);
            assert_close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
            let (got, want) = run_product::<bf16, f32>(2, case, &mut draw);
            assert_close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
        }
    }
    // Several slices of k, several passes of columns, and k = 0.
    for (m, n, k) in [(7, 33, 1100), (9, 2100, 3), (100, 70, 513), (6, 5, 0), (105, 70, 2049), (490, 2050, 1025)] {
        for bits in [0, 3, 30, 31, 63] {
            let case = case_from_flags(m, n, k, bits);
            if m * n * k < 1 << 25 {
                let (got, want) = run_product::<f32, f32>(3, case, &mut draw);
                assert_close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
                let (got, want) = run_product::<bf16, f32>(3, case, &mut draw);
                assert_close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
            } else if bits != 30 {
                continue;
            }
            // The last shape has more rows than are summed at once.
            let (got, want) = run_product::<bf16, bf16>(3, case, &mut draw);
            assert_close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn products_of_any_shape_match_references(
        m in 1usize..40, n in 1usize..150, k in 1usize..90, bits in 0usize..64, threads in 1usize..4, seed: u64,
    ) {
        let case = case_from_flags(m, n, k, bits);
        let (got, want) = run_product::<f32, f32>(threads, case, &mut Draw(seed));
        assert_close(&got, &want, tolerance::<f32>(k), &format!("{case:?}"));
        let (got, want) = run_product::<bf16, bf16>(threads, case, &mut Draw(seed));
        assert_close(&got, &want, tolerance::<bf16>(k), &format!("{case:?}"));
    }
}

#[test]
fn bf16_products_propagate_nan_and_infinity() {
    // A pair with the bits of a signalling f32 NaN, next to ordinary ones.
    let mut b = vec![bf16::ONE; 64 * 64];
    b[1] = bf16::INFINITY;
    b[0] = bf16::from_bits(1);
    let a = vec![bf16::ONE; 5 * 64];
    for b_transposed in [false, true] {
        let p = Product { b_transposed, ..Product::new(5, 64, 64, &a, &b) };
        let mut out = vec![bf16::NAN; 5 * 64];
        product(&pool(1), p, &mut out, &mut scratch(workspace::cpu::bf16_product(1, 5, 64, 64)));
        let infinite = if b_transposed { 0 } else { 1 };
        for row in out.chunks(64) {
            for (j, x) in row.iter().enumerate() {
                // The subnormal is too small to change a bf16 of this size.
                let finite = if !b_transposed && j == 0 { 63.0 } else { 64.0 };
                assert!(*x == if j == infinite { bf16::INFINITY } else { bf16::from_f32(finite) }, "{j}: {x}");
            }
        }
    }
    // Neighbouring elements never affect a row, even if k is odd.
    let a: Vec<bf16> = (0..5 * 33).map(|i| if i / 33 == 2 { bf16::NAN } else { bf16::ONE }).collect();
    let p = Product::new(5, 3, 33, &a, &b[64..64 + 99]).b_transposed();
    let mut out = vec![bf16::ZERO; 15];
    product(&pool(1), p, &mut out, &mut scratch(workspace::cpu::bf16_product(1, 5, 3, 33)));
    for (i, x) in out.iter().enumerate() {
        assert!(if i / 3 == 2 { x.is_nan() } else { *x == bf16::from_f32(33.0) }, "{i}: {x}");
    }
}
