//! The configurations of `configs/gallery/`.

use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::cuda::GpuModel;
use ottava_train::plan::MemoryPlan;
use std::path::{Path, PathBuf};

/// The number of layers that are planned: the first layers of a model with experts or recurrent layers have all kinds of layers.
const LAYERS: usize = 3;

/// Each configuration is read without a warning, planned with the shape that its first lines name, and listed in docs/gallery.md.
#[test]
fn configurations_of_the_gallery_are_planned() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages = std::fs::read_to_string(root.join("docs/gallery.md")).unwrap();
    let folder = std::fs::read_dir(root.join("configs/gallery")).unwrap();
    let mut files: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 25, "{}", files.len());
    let gpu = Device::dry_gpu(GpuModel::h200());
    for file in files {
        let (name, text) = (file.file_name().unwrap().to_string_lossy(), std::fs::read_to_string(&file).unwrap());
        assert!(pages.contains(&format!("`{name}`")), "docs/gallery.md lists {name}");
        let after = |start: &str| text.lines().find_map(|line| line.split_once(start)).map(|(_, rest)| rest.trim());
        let shape = after("# Shape: ").unwrap_or_else(|| panic!("{name} names a shape"));
        let gpus = after("--gpus ").map_or(1, |gpus| gpus.parse().unwrap());
        let mut config = RunConfig::read(&file, &[]).unwrap_or_else(|error| panic!("{error}")).config;
        assert_eq!(config.without_effect(), [""; 0], "{name}");
        assert_eq!(config.output_dir, Path::new("runs").join(file.file_stem().unwrap()), "{name}");
        config.model.path = root.join(shape);
        let mut config = config.resolved(&mut |_| Ok(())).unwrap_or_else(|error| panic!("{name}: {error}"));
        config.share(gpus).unwrap();
        let sizes = config.decoder_config().unwrap_or_else(|error| panic!("{name}: {error}"));
        config.expect_positions(&sizes).unwrap();
        let plan = MemoryPlan::new(&ResolvedConfig::fastest(&config), &sizes.with_layers(LAYERS), &gpu);
        let plan = plan.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(plan.peak_bytes > 0, "{name}");
    }
}
