use super::*;

fn folder(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }
    folder
}

/// Returns the files that `source` names, in a folder with files of these `names`.
fn found(names: &[&str], source: &str) -> Result<Vec<String>, String> {
    let folder = folder(names);
    let start = format!("{}/", folder.path().display());
    let short = |text: String| text.replace(&start, "");
    let files = expand(&[folder.path().join(source)], SplitUse::Training).map_err(|error| short(error.to_string()))?;
    Ok(files.into_iter().map(|path| short(path.display().to_string())).collect())
}

#[test]
fn folders_and_patterns_name_their_files_in_order() {
    let parquet =
        ["data/train-00001.parquet", "data/train-00000.parquet", "README.md", "dataset_info.json", ".cache/x.parquet"];
    let sorted = ["data/train-00000.parquet", "data/train-00001.parquet"];
    assert_eq!(found(&parquet, "").unwrap(), sorted);
    assert_eq!(found(&parquet, "data/train-*.parquet").unwrap(), sorted);
    assert_eq!(found(&parquet, "*/train-0000?.parquet").unwrap(), sorted);
    assert_eq!(found(&["b.txt", "a.md", "c.pdf"], "").unwrap(), ["a.md", "b.txt"]);
    assert_eq!(found(&["a.idx", "a.bin", "weights.bin"], "").unwrap(), ["a.bin"], "a pair is one source");
    assert_eq!(found(&["a.idx", "a.bin"], "a.idx").unwrap(), ["a.bin"]);
    assert_eq!(found(&["a.idx", "a.bin"], "a.*").unwrap(), ["a.bin"]);
    assert_eq!(found(&["test.jsonl"], "test.jsonl").unwrap(), ["test.jsonl"], "named itself");
    assert_eq!(found(&["data/train.jsonl", "data/test.jsonl"], "").unwrap(), ["data/train.jsonl"]);
    assert_eq!(found(&["train/0.jsonl", "test/0.jsonl", "validation/0.jsonl"], "").unwrap(), ["train/0.jsonl"]);
    assert_eq!(found(&["train/0.jsonl", "test/0.jsonl"], "test").unwrap(), ["test/0.jsonl"], "named itself");
    assert_eq!(found(&["train/0.csv", "test/0.jsonl", "__pycache__/x.csv"], "").unwrap(), ["train/0.csv"]);
}

#[test]
fn what_is_not_clear_is_an_error() {
    for (names, source, says) in [
        (&["a.pdf"][..], "", "holds no file of data"),
        (&["a.jsonl", "b.csv"], "", "several kinds of data, such as a.jsonl and b.csv"),
        (&["a.jsonl", "test/b.jsonl"], "", "test/b.jsonl is not for training by its name"),
        (&["a.jsonl"], "*.parquet", "no file has a name of this pattern"),
        (&["a.pdf"], "*.pdf", "unknown kind of data"),
        (&["a.pdf"], "a.pdf", "unknown kind of data"),
        (&["a.parquet.gz"], "a.parquet.gz", "unpack it"),
        (&[], "absent.txt", "absent.txt: "),
    ] {
        let error = found(names, source).unwrap_err();
        assert!(error.contains(says), "{source} of {names:?}: {error}");
    }
}

#[test]
fn the_card_of_a_data_set_names_its_splits() {
    let folder = folder(&["a.jsonl", "b.jsonl", "c.jsonl"]);
    let card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n  - split: test\n    path: b.jsonl\n---\n";
    std::fs::write(folder.path().join("README.md"), card).unwrap();
    let names = |use_| {
        let files = expand(&[folder.path().to_path_buf()], use_).unwrap();
        files.iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        (names(SplitUse::Training), names(SplitUse::Validation)),
        (vec!["a.jsonl".into()], vec!["b.jsonl".into()])
    );
}

#[test]
fn a_file_that_is_not_there_has_a_remedy() {
    let error = expand(&["owner-of-nothing/alpaca".into()], SplitUse::Training).unwrap_err().to_string();
    assert!(error.contains("`ottava download --dataset owner-of-nothing/alpaca"), "{error}");
    let error = expand(&["no/where/a.jsonl".into()], SplitUse::Training).unwrap_err().to_string();
    assert!(error.contains("relative paths start at the folder that the command runs in, /"), "{error}");
}
