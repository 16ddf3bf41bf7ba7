//! The splits of a folder (train, validation, test). They are recognized by the names of files and folders, like in the library `datasets`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::cards;

/// The use of the files of a folder with several splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitUse {
    /// Training, with the files of the split `train`.
    Training,
    /// Validation, with the files of the first existing split among `validation`, `test` and `train`.
    Validation,
}

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    Train,
    Validation,
    Test,
}

/// The words in names that mean a split, with their splits.
const WORDS: [(&str, Split); 10] = [
    ("train", Split::Train),
    ("training", Split::Train),
    ("validation", Split::Validation),
    ("valid", Split::Validation),
    ("val", Split::Validation),
    ("dev", Split::Validation),
    ("test", Split::Test),
    ("testing", Split::Test),
    ("eval", Split::Test),
    ("evaluation", Split::Test),
];

/// Returns the files of `folder` for `use_`: if no file is named after a split, all files; otherwise, the files of the split.
///
/// If the card of the data set names files of the folder, it determines the splits. Otherwise, names of folders take precedence over names of files.
/// Errors with the reason if the split has no files or several names.
pub(super) fn choose(folder: &Path, files: Vec<&Path>, use_: SplitUse) -> Result<HashSet<PathBuf>, String> {
    let inner: Vec<&Path> = files.iter().map(|file| file.strip_prefix(folder).unwrap_or(file)).collect();
    let card = cards::read(folder)?;
    let of_card: Vec<Option<&str>> = inner.iter().map(|path| card.as_ref()?.split_of(path)).collect();
    let has_card = of_card.iter().any(Option::is_some);
    let of_folders: Vec<Option<Split>> = inner.iter().map(|path| of_folders(path)).collect();
    let splits: Vec<Option<Split>> = match of_folders.iter().any(Option::is_some) {
        _ if has_card => of_card.iter().map(|name| name.and_then(of_words)).collect(),
        true => of_folders,
        false => inner.iter().map(|path| of_words(&file_name(path))).collect(),
    };
    if splits.iter().all(Option::is_none) {
        return Ok(files.into_iter().map(Path::to_path_buf).collect());
    }
    let wanted: &[Split] = match use_ {
        SplitUse::Training => &[Split::Train],
        SplitUse::Validation => &[Split::Validation, Split::Test, Split::Train],
    };
    let has = |split: &&Split| splits.contains(&Some(**split));
    let Some(split) = wanted.iter().find(has) else {
        let held_out = splits.iter().position(Option::is_some).unwrap_or(0);
        return Err(format!(
            "{} is not for training by its name, and no file or folder is named after the split `train`; name the files to train on, or a \
             pattern",
            files[held_out].display()
        ));
    };
    let chosen: Vec<&Path> =
        files.iter().zip(&splits).filter(|(_, found)| **found == Some(*split)).map(|(file, _)| *file).collect();
    if !has_card {
        one_name(&chosen)?;
    }
    if chosen.len() < files.len() {
        tracing::info!(
            "{}: {} of {} files are read, those of the split `{}`",
            folder.display(),
            chosen.len(),
            files.len(),
            WORDS.iter().find(|(_, known)| known == split).map_or("", |(word, _)| word)
        );
    }
    Ok(chosen.into_iter().map(Path::to_path_buf).collect())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the split after which a folder around a file is named. The innermost such folder is used.
fn of_folders(path: &Path) -> Option<Split> {
    path.ancestors().skip(1).find_map(|folder| of_words(&file_name(folder)))
}

/// Returns the split of the first word in `name` that means a split. Words are separated by `-`, `.`, `_`, spaces and digits.
fn of_words(name: &str) -> Option<Split> {
    let name = name.to_lowercase();
    let mut words = name.split(|c: char| "-._ ".contains(c) || c.is_ascii_digit());
    // `train` takes precedence over other words, as in datasets.
    let found: Vec<Split> = words
        .by_ref()
        .filter_map(|word| WORDS.iter().find(|(known, _)| *known == word))
        .map(|(_, split)| *split)
        .collect();
    found.iter().find(|split| **split == Split::Train).or(found.first()).copied()
}

/// Errors if the files are shards of several splits, such as `train_sft-00000-of-00002.parquet` and `train_gen-00000-of-00001.parquet`.
fn one_name(files: &[&Path]) -> Result<(), String> {
    let split = |file: &Path| {
        let name = file_name(file);
        let (stem, shard) = name.split_once("-of-")?;
        let (split, number) = stem.rsplit_once('-')?;
        let is_shard = number.len() == 5 && shard.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit());
        is_shard.then(|| split.to_string())
    };
    let mut names: Vec<String> = files.iter().filter_map(|file| split(file)).collect();
    names.sort();
    names.dedup();
    match names.as_slice() {
        [first, second, ..] => Err(format!(
            "the folder holds the splits `{first}` and `{second}`; name the files of one of them by a pattern, such as {}/{first}-*",
            files[0].parent().unwrap_or(Path::new(".")).display()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str], use_: SplitUse) -> Result<Vec<String>, String> {
        let paths: Vec<PathBuf> = files.iter().map(|file| Path::new("d").join(file)).collect();
        let mut found: Vec<String> = choose(Path::new("d"), paths.iter().map(PathBuf::as_path).collect(), use_)?
            .into_iter()
            .map(|path| path.strip_prefix("d").unwrap().display().to_string())
            .collect();
        found.sort();
        Ok(found)
    }

    #[test]
    fn training_takes_the_files_of_the_split_train_alone() {
        for (files, expected) in [
            (&["train/0.jsonl", "test/0.jsonl", "validation/0.jsonl"][..], &["train/0.jsonl"][..]),
            (
                &["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"],
                &["train/data-00000-of-00001.arrow"],
            ),
            (
                &[
                    "data/train-00000-of-00002.parquet",
                    "data/train-00001-of-00002.parquet",
                    "data/test-00000-of-00001.parquet",
                ],
                &["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ),
            (&["en/train/a.jsonl", "en/test/a.jsonl"], &["en/train/a.jsonl"]),
            (&["train_data/a.jsonl", "testing/a.jsonl"], &["train_data/a.jsonl"]),
            (&["train.jsonl", "test.jsonl"], &["train.jsonl"]),
            (&["train.jsonl", "dev.jsonl"], &["train.jsonl"]),
            (&["my_train_file.jsonl", "my_test_file.jsonl"], &["my_train_file.jsonl"]),
            (&["2012-train.jsonl", "2012-test.jsonl", "a.eval.jsonl", "evaluation.jsonl"], &["2012-train.jsonl"]),
            (&["train.jsonl", "other.jsonl"], &["train.jsonl"]),
            (&["train/a.jsonl", "b.jsonl"], &["train/a.jsonl"]),
            (&["Training/a.jsonl", "VAL/a.jsonl"], &["Training/a.jsonl"]),
            (&["a.jsonl", "b.jsonl"], &["a.jsonl", "b.jsonl"]),
            (&["trainer.jsonl", "latest.jsonl", "contest.jsonl"], &["contest.jsonl", "latest.jsonl", "trainer.jsonl"]),
        ] {
            assert_eq!(chosen(files, SplitUse::Training).unwrap(), expected, "{files:?}");
        }
        for (files, says) in [
            (&["test.jsonl"][..], "no file or folder is named after the split `train`"),
            (&["a.jsonl", "test/b.jsonl"], "no file or folder is named after the split `train`"),
            (
                &["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
                "`train_gen` and `train_sft`",
            ),
        ] {
            let reason = chosen(files, SplitUse::Training).unwrap_err();
            assert!(reason.contains(says), "{reason}");
        }
    }

    #[test]
    fn validation_takes_the_split_validation_or_test() {
        let all = ["train/a.jsonl", "test/a.jsonl", "validation/a.jsonl"];
        assert_eq!(chosen(&all, SplitUse::Validation).unwrap(), ["validation/a.jsonl"]);
        assert_eq!(chosen(&all[..2], SplitUse::Validation).unwrap(), ["test/a.jsonl"]);
        assert_eq!(chosen(&all[..1], SplitUse::Validation).unwrap(), ["train/a.jsonl"]);
    }
}
