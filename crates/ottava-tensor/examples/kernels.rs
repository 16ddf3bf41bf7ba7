//! Prints how fast every memory-bound op runs on the first GPU at the sizes of a 7B model, against a plain copy.
//! Other sizes: `kernels T C F`.

use ottava_tensor::{Device, bench};

fn main() -> ottava_tensor::Result<()> {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|n| n.parse().ok()).collect();
    let [t, c, f] = sizes.try_into().unwrap_or([8192, 4096, 11008]);
    let device = Device::cuda(0)?;
    println!("{device}, T = {t}, C = {c}, F = {f}; a copy moves {:.0} GB/s", bench::copy_bandwidth(&device)? * 1e-9);
    println!("{:<44} {:>9} {:>7} {:>10}", "op", "µs", "GB/s", "% of copy");
    for row in bench::kernels(&device, t, c, f)? {
        let rate = row.bytes as f64 / (row.milliseconds * 1e-3) * 1e-9;
        let share = 100.0 * row.floor_milliseconds / row.milliseconds;
        println!("{:<44} {:>9.1} {rate:>7.0} {share:>10.1}", row.name, row.milliseconds * 1e3);
    }
    Ok(())
}
