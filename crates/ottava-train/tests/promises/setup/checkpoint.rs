//! Checkpoints of models without a trainer.

use ottava_checkpoint::slices::{FOLDER, SliceWriter};
use ottava_checkpoint::{CheckpointWriter, Contents, Progress};
use ottava_common::fs::RealFs;
use ottava_data::{DataState, LoaderState};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_parallel::optim::Optimizer;
use serde_json::json;
use std::path::Path;

/// Returns the progress of a run after `step` steps, without data.
pub fn progress(step: u64, model: &mut Decoder) -> Progress {
    let start = Progress::start(DataState::One(LoaderState::start(0)));
    Progress { step, scaling_slots: model.scaling().names(), ..start }
}

/// Writes a checkpoint into `folder`, together with all ranks. Files of weights have at most `max_bytes`. Returns the names of the files of weights
/// that this rank has written.
pub fn save_checkpoint(
    folder: &Path,
    step: u64,
    max_bytes: usize,
    model: &mut Decoder,
    optimizer: &mut dyn Optimizer,
    partition: &Partition,
) -> Vec<String> {
    let (ranks, progress) = (partition.ranks(), progress(step, model));
    let mut begun = ranks.leads().then(|| CheckpointWriter::begin(&RealFs, folder, step).unwrap());
    begun.iter_mut().for_each(|writer| writer.subfolder(FOLDER).unwrap());
    let path = begun.as_ref().map_or(String::new(), |writer| writer.path().display().to_string());
    let path = ranks.follow("a path", &path).unwrap();
    let joined = || CheckpointWriter::join(&RealFs, Path::new(&path), step, &[FOLDER]);
    let mut writer = begun.unwrap_or_else(joined);
    let (contents, mut live) = Contents::with_files_of(max_bytes, model, optimizer, partition).unwrap();
    let slices = contents.write(&mut writer, |name| Ok(live.get(name)?.read_bytes()?)).unwrap();
    live.gather_rest().unwrap();
    let files = writer.take_files();
    let names: Vec<String> = files.keys().filter(|name| name.starts_with("model")).cloned().collect();
    let all = ranks.all("files", Ok((files, slices))).unwrap();
    if ranks.leads() {
        let mut slices = SliceWriter::default();
        for (files, index) in all {
            writer.adopt(files);
            slices.adopt(index);
        }
        slices.finish(&mut writer).unwrap();
        writer.finish(json!(progress)).unwrap();
    }
    names
}
