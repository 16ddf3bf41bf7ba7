//! Merges adapters into the weights of their base model, and writes a plain model folder.

use crate::adapter::LinearAdapter;
use crate::merge_experts::{ExpertChanges, low_rank_change};
use crate::model::expect_new_folder;
use crate::safetensors::TensorInfo;
use crate::safetensors_write::MAX_FILE_BYTES;
use crate::template::{write_merged, write_pooling, write_text_files};
use crate::{AdapterFolder, CheckpointWriter, Texts, WeightFiles, with_experts_of, write_model};
use ottava_common::error::{Error, Result};
use ottava_common::fs::RealFs;
use ottava_common::interrupt;
use ottava_data::Tokenizer;
use ottava_models::layers::SCORE;
use ottava_models::{ConfigFile, DecoderConfig, Labels, classifier, decoder_config};
use ottava_tensor::ops::{add, cast, magnitude_factors, row_squares, scale_columns, transpose};
use ottava_tensor::{DType, Tensor};
use std::path::Path;

/// Merges `adapter` into the model of the folder `base`, writes the result as the new folder `output`, and returns the number of merged weights.
///
/// Each `W` that has an adapter becomes `W + scale · B · A`. With DoRA, each row of this sum is also multiplied by its magnitude and divided by its
/// norm. Sums are F32, and are rounded once to the type of `W`. Modules that were trained whole replace the modules of the base. Other weights keep their
/// bits, except that weights in FP8 become BF16. The tokenizer of the adapter's folder is written if its tokens fit. An adapter with the head of a classifier
/// gives a classifier with these `labels`, or with numbered labels.
///
/// Errors with [`Error::Model`] if the adapter has matrices of weights that the model does not have, or another head than the tied embedding of a
/// vision-language model. Errors with [`Error::Config`] if `output` exists
/// or is inside a source. After an error, `output` does not exist.
pub fn merge(base: &Path, adapter: &AdapterFolder, labels: Option<&Labels>, output: &Path) -> Result<usize> {
    expect_new_folder(output, &[base, adapter.path()])?;
    let config = ConfigFile::read(base)?;
    let of_base = decoder_config(&config)?;
    let own = of_base.vocabulary;
    let sizes = adapter.on(of_base);
    let transposed = sizes.stream.names.transposed;
    let files = WeightFiles::open(base)?;
    let mut infos = files.names().map(|name| files.info(name)).collect::<Result<Vec<_>>>()?;
    let (score, score_name) = (adapter.score()?, format!("{SCORE}.weight"));
    if let Some(score) = &score {
        put_score(&mut infos, &score_name, score, &sizes);
    }
    let head = divided_head(&sizes, &infos);
    infos.extend(head.iter().map(|[head, _]| head.clone()));
    if sizes.vocabulary > own {
        let names = sizes.stream.names;
        let tables = [names.embedding, names.head].map(|name| format!("{name}.weight"));
        infos
            .iter_mut()
            .filter(|info| tables.iter().any(|table| table.ends_with(&info.name)))
            .for_each(|info| info.shape[0] = sizes.vocabulary);
    }
    let experts = ExpertChanges::new(adapter, with_experts_of(sizes.clone(), base))?;
    adapter.expect_weights(&infos, experts.adapters())?;
    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    let texts = Texts::of_adapter(base, adapter.path(), sizes.vocabulary)?;
    let mut values = match &score {
        None => config.values().clone(),
        Some(score) => {
            let numbered = Labels::numbered(score.shape()[0]);
            let labels = labels.filter(|labels| labels.names.len() == numbered.names.len()).unwrap_or(&numbered);
            let own = texts.as_ref().and_then(|texts| texts.tokenizer.padding_id());
            let padding = own.or(Tokenizer::load(base).ok().and_then(|tokenizer| tokenizer.padding_id()));
            classifier(&config, padding, labels)?.values().clone()
        }
    };
    values.shift_remove("quantization_config");
    if sizes.divided_head().is_some() {
        if files.carried().is_wrapper() {
            return Err(Error::Model(format!(
                "{}: the adapter trained the head or the embedding, which the text model of {} shares; a merged vision-language folder with two of them \
                 is not written: merge with PEFT",
                adapter.path().display(),
                base.display()
            )));
        }
        values.insert("tie_word_embeddings".into(), false.into());
    }
    if sizes.vocabulary > own {
        values.insert("vocab_size".into(), sizes.vocabulary.into());
    }
    match texts {
        Some(texts) => write_merged(&mut writer, values, base, (adapter.path(), &texts))?,
        None => write_text_files(&mut writer, values, base)?,
    }
    write_pooling(&mut writer, &[adapter.path(), base])?;
    let mut merged = 0;
    write_model(&mut writer, &infos, files.carried(), MAX_FILE_BYTES, |info| {
        interrupt::check("merging the model")?;
        if let Some(score) = score.as_ref().filter(|_| info.name == score_name) {
            merged += 1;
            return Ok(cast(score, info.dtype)?.read_bytes()?);
        }
        if let Some(whole) = adapter.whole(&info.name)? {
            expect_shape(info, whole.shape())?;
            merged += 1;
            return Ok(cast(&whole, info.dtype)?.read_bytes()?);
        }
        // A head that has become a tensor of its own has the values of the embedding.
        let stored = head.iter().find(|[head, _]| head.name == info.name).map_or(info, |[_, table]| table);
        if let Some(sum) = experts.merged(adapter, info, || files.values(&info.name))? {
            merged += 1;
            return Ok(cast(&sum, info.dtype)?.read_bytes()?);
        }
        let Some(own) = adapter.of_weight(&info.name)? else { return files.bytes(stored) };
        merged += 1;
        let sum = adapted(&files.values(&info.name)?, &own, transposed, info)?;
        Ok(cast(&sum, info.dtype)?.read_bytes()?)
    })?;
    writer.finish_folder()?;
    Ok(merged)
}

/// Returns the head and the embedding's table if the folder has one tensor for both and the model of these `sizes` has two.
fn divided_head(sizes: &DecoderConfig, infos: &[TensorInfo]) -> Option<[TensorInfo; 2]> {
    let [head, table] = sizes.divided_head()?;
    // A folder of a decoder without its head omits the prefix of its names.
    let table = infos.iter().find(|info| table.ends_with(&info.name))?;
    let is_missing = infos.iter().all(|info| info.name != head);
    is_missing.then(|| [TensorInfo { name: head, ..table.clone() }, table.clone()])
}

/// Replaces the head in `infos` by the head `score` with this name, of a classifier of these `sizes`, in the type of the embedding.
fn put_score(infos: &mut Vec<TensorInfo>, name: &str, score: &Tensor, sizes: &DecoderConfig) {
    let names = sizes.stream.names;
    let [embedding, head] = [names.embedding, names.head].map(|name| format!("{name}.weight"));
    let dtype = infos.iter().find(|info| embedding.ends_with(&info.name)).map_or(score.dtype(), |info| info.dtype);
    infos.retain(|info| info.name != head && info.name != name);
    let dtype = if dtype.is_fp8() { DType::BF16 } else { dtype };
    infos.push(TensorInfo { name: name.into(), shape: score.shape().to_vec(), dtype });
}

/// Errors if the adapter makes a weight of another shape than the base has.
fn expect_shape(info: &TensorInfo, made: &[usize]) -> Result<()> {
    let TensorInfo { name, shape, .. } = info;
    match shape == made {
        true => Ok(()),
        false => Err(Error::Model(format!("`{name}` has shape {shape:?}, and its adapter makes it {made:?}"))),
    }
}

/// Returns `W + scale · B · A` in F32. If the adapter has magnitudes, the rows are scaled to them.
fn adapted(w: &Tensor, adapter: &LinearAdapter, transposed: bool, info: &TensorInfo) -> Result<Tensor> {
    let LinearAdapter { a, b, magnitude, scale } = adapter;
    let change = low_rank_change(a, b, *scale)?;
    let [rows, columns] = change.dims("merge: adapter")?;
    expect_shape(info, &if transposed { [columns, rows] } else { [rows, columns] })?;
    let w = if transposed { transpose(w)? } else { w.clone() };
    let mut sums = add(&w, &change)?;
    if let Some(magnitude) = magnitude {
        let factors = magnitude_factors(&row_squares(&w, Some(&change))?, magnitude)?;
        sums = transpose(&scale_columns(&transpose(&sums)?, &factors)?)?;
    }
    let sums = if transposed { transpose(&sums)? } else { sums };
    Ok(sums.reshape(&info.shape)?)
}
