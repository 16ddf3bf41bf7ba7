use super::checksums;
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Tensor};

fn sum(bytes: &[u8]) -> i64 {
    let x = Tensor::from_bytes(&Device::Cpu, &[bytes.len()], DType::E4M3, bytes).unwrap();
    checksums(&[&x]).unwrap().to_vec::<i64>().unwrap()[0]
}

#[test]
fn checksums_agree_across_devices() {
    let sizes = [1, 3, 7, 64, 257, 4099, 300_001];
    let inputs: Vec<_> = sizes
        .into_iter()
        .zip([DType::F32, DType::BF16, DType::F64, DType::F16].into_iter().cycle())
        .map(|(n, dtype)| normals("checksum", &[n], dtype))
        .collect();
    parity(&inputs, Tolerance::Exact, |x| {
        // This slice starts within a word.
        let slice = x[5].rows(1, 4000)?;
        assert_eq!(slice.dtype(), DType::BF16);
        let tensors: Vec<_> = x.iter().chain([&slice]).collect();
        Ok(vec![checksums(&tensors)?])
    });
}

#[test]
fn a_word_has_the_checksum_of_its_formula() {
    // For words of 0, the hashes are the first outputs of the SplitMix64 generator with the state 0.
    assert_eq!(sum(&[0; 8]) as u64, 0xE220_A839_7B1D_CDAF);
    assert_eq!(sum(&[0; 16]) as u64, 0xE220_A839_7B1D_CDAFu64.wrapping_add(0x6E78_9E6A_A1B9_65F4));
}

#[test]
fn any_flipped_bit_and_any_swap_is_noticed() {
    let bytes: Vec<u8> = (0..45u32).map(|i| (i * i % 251) as u8).collect();
    let expected = sum(&bytes);
    for bit in 0..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(sum(&flipped), expected, "bit {bit}");
    }
    for at in 0..bytes.len() - 8 {
        let mut swapped = bytes.clone();
        swapped.swap(at, at + 8);
        assert_ne!(sum(&swapped), expected, "bytes {at} and {}", at + 8);
    }
}
