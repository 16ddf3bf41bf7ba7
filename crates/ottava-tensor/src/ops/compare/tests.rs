use super::{SUMS, compare, compare_along, compare_codes, compare_rows};
use crate::ops::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Operand, dequantize, transpose};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Granularity, Result, Tensor};

/// The tolerance of F64 sums of up to 131,072 terms in another order. Each addition rounds by 2⁻⁵³ of a partial sum; up to 1.2e-13 of a sum was seen.
const ROUNDING: f64 = 1e-12;

fn sums(x: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let mut sums = Tensor::zeros(x.device(), &[2, SUMS], DType::F64)?;
    compare(x, reference, &mut sums, 1)?;
    Ok(sums)
}

#[test]
fn sums_are_those_of_the_definition() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let tensor = |values: &[f64]| {
            let x = Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
            crate::ops::cast(&x, dtype).unwrap()
        };
        let (x, r) = (tensor(&[1.0, 2.0, -3.0]), tensor(&[1.0, 3.0, 1.0]));
        assert_eq!(sums(&x, &r).unwrap().to_vec::<f64>().unwrap(), [0.0, 0.0, 0.0, 0.0, 14.0, 11.0, 4.0, 17.0]);
    }
}

#[test]
fn sums_agree_across_devices() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for shape in [[1, 1], [7, 13], [64, 1000], [513, 1031]] {
            let inputs = [normals("x", &shape, dtype), normals("r", &shape, dtype)];
            // Sums in F64 run in another order.
            parity(&inputs, Tolerance::Steps(DType::F64, 4096.0), |x| Ok(vec![sums(&x[0], &x[1])?]));
            // This slice is not aligned.
            parity(&inputs, Tolerance::Steps(DType::F64, 4096.0), |x| {
                let [x, r] = [&x[0], &x[1]].map(|x| x.reshape(&[x.len()]).and_then(|x| x.rows(x.len() / 2, x.len())));
                Ok(vec![sums(&x?, &r?)?])
            });
        }
    }
}

#[test]
fn wrong_sizes_are_errors() {
    let (x, r) = (normals("x", &[4, 8], DType::BF16), normals("r", &[4, 9], DType::BF16));
    assert!(sums(&x, &r).unwrap_err().to_string().contains("[4, 8] and its reference of shape [4, 9]"));
    let mut sums = Tensor::zeros(x.device(), &[1, SUMS], DType::F64).unwrap();
    assert!(compare(&x, &x, &mut sums, 1).unwrap_err().to_string().contains("row 1 is beyond"));
}

/// Returns new sums. `compare` writes row 1 of the sums.
fn row(x: &Tensor, compare: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<Tensor> {
    let mut sums = Tensor::zeros(x.device(), &[2, SUMS], DType::F64)?;
    compare(&mut sums)?;
    Ok(sums)
}

#[test]
fn sums_of_sampled_rows_are_those_of_the_rows_alone() {
    for dtype in [DType::F32, DType::BF16] {
        for (shape, every) in [([5, 7], 2), ([130, 257], 3), ([64, 64], 16)] {
            let x = normals("x", &shape, dtype);
            let reference = normals("r", &[shape[0].div_ceil(every), shape[1]], dtype);
            let parts: Vec<_> = (0..shape[0]).step_by(every).map(|row| x.rows(row, row + 1).unwrap()).collect();
            let mut rows = reference.empty_like().unwrap();
            parts.iter().enumerate().for_each(|(row, part)| rows.copy_from(row, part).unwrap());
            let all = row(&x, |sums| compare_rows(&x, every, &reference, sums, 1)).unwrap();
            for (got, expected) in values(&all).iter().zip(values(&sums(&rows, &reference).unwrap())) {
                assert!((got - expected).abs() <= ROUNDING * expected.abs(), "{got} {expected}");
            }
            parity(&[x, reference], Tolerance::Steps(DType::F64, 4096.0), |x| {
                Ok(vec![row(&x[0], |sums| compare_rows(&x[0], every, &x[1], sums, 1))?])
            });
        }
    }
    let (x, r) = (normals("x", &[5, 7], DType::BF16), normals("r", &[2, 7], DType::BF16));
    let error = row(&x, |sums| compare_rows(&x, 2, &r, sums, 0)).unwrap_err();
    assert!(error.to_string().contains("[5, 7], of which one row in 2 is compared, and its reference"), "{error}");
}

#[test]
fn sums_of_codes_are_those_of_their_values() {
    let granularities = [
        Granularity::PerTensor,
        Granularity::PerRow,
        Granularity::Blocks1x128,
        Granularity::Blocks128x128,
        Granularity::MixedBlocks,
    ];
    for (shape, format) in [([3, 300], DType::E4M3), ([130, 257], DType::E5M2), ([256, 512], DType::E4M3)] {
        for granularity in granularities {
            // In F32, dequantized values are exact.
            let both = |x: &Tensor| -> Result<Vec<Tensor>> {
                let mut statistics = CastStatistics::new(x.device(), 1)?;
                let scale = Tensor::from_slice(x.device(), &[1], &[3.5f32])?;
                let scale = match granularity {
                    Granularity::PerTensor => CastScale::Given(&scale),
                    finer => CastScale::Own(finer, CurrentScaling::default()),
                };
                let to = Fp8Output { format, scale, copies: CodeCopies::Both, statistics: &mut statistics, slot: 0 };
                let codes = to.cast(x)?;
                let (rows, columns) = (Operand::Rows(&codes), Operand::Columns(&codes));
                let sums_of = |codes| row(x, |sums| compare_codes(codes, x, sums, 1));
                let mut all = vec![sums_of(rows)?, sums_of(columns)?];
                if matches!(x.device(), Device::Cpu) && x.dtype() == DType::F32 {
                    all.push(sums(&dequantize(rows, 1, DType::F32)?, x)?);
                    all.push(sums(&transpose(&dequantize(columns, 1, DType::F32)?)?, x)?);
                }
                Ok(all)
            };
            let of_values = both(&normals("x", &shape, DType::F32)).unwrap();
            for (codes, expected) in of_values[..2].iter().zip(&of_values[2..]) {
                for (got, expected) in values(codes).iter().zip(values(expected)) {
                    assert!((got - expected).abs() <= ROUNDING * expected.abs(), "{granularity}: {got} {expected}");
                }
            }
            let x = normals("x", &shape, DType::BF16);
            parity(&[x], Tolerance::Steps(DType::F64, 4096.0), |x| both(&x[0]));
        }
    }
}

#[test]
fn sums_along_a_direction_are_those_of_products_of_rows() {
    let tensor = |values: [f32; 6]| Tensor::from_slice(&Device::Cpu, &[2, 3], &values).unwrap();
    let (x, r) = (tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]));
    let direction = tensor([1.0, 0.0, 1.0, 1.0, -1.0, 0.0]);
    // The products are 4 and -1 for `x`, and 2 and 0 for `r`.
    let sums = row(&x, |sums| compare_along(&x, &r, &direction, sums, 1)).unwrap();
    assert_eq!(values(&sums)[SUMS..], [17.0, 4.0, 8.0, 5.0]);
    for dtype in [DType::F32, DType::BF16] {
        for shape in [[1, 1], [7, 13], [130, 1031]] {
            let inputs = ["x", "r", "d"].map(|name| normals(name, &shape, dtype));
            // Terms of the products cancel, and their sums are added in another order.
            parity(&inputs, Tolerance::Steps(DType::F64, 1e7), |x| {
                Ok(vec![row(&x[0], |sums| compare_along(&x[0], &x[1], &x[2], sums, 1))?])
            });
        }
    }
}
