//! Serves model folders with the protocol of the Hub on the loopback address, for `scripts/check_hub.py` and for trying commands without a network:
//! `cargo run -p ottava-hub --example fake_hub -- models/OWNER/NAME=FOLDER datasets/OWNER/NAME=FOLDER`. Prints its address, and ends with its
//! standard input. The argument `slow=MILLISECONDS` delays each file.

use ottava_hub::testing::FakeHub;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

fn files(root: &Path, folder: &Path, found: &mut Vec<(String, Vec<u8>)>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files(root, &path, found)?;
        } else if let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str) {
            found.push((name.to_string(), std::fs::read(&path)?));
        }
    }
    Ok(())
}

fn main() -> std::io::Result<()> {
    let hub = FakeHub::start();
    for arg in std::env::args().skip(1) {
        let (repo, folder) = arg.split_once('=').expect("an argument REPOSITORY=FOLDER");
        if repo == "slow" {
            let pause = Duration::from_millis(folder.parse().expect("a number of milliseconds"));
            hub.fail(|faults| faults.slow = Some(pause));
            continue;
        }
        let mut found = Vec::new();
        files(Path::new(folder), Path::new(folder), &mut found)?;
        let found: Vec<_> = found.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        hub.add(repo, &found);
    }
    println!("{}", hub.url());
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
