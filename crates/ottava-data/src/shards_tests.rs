use std::collections::BTreeMap;
use std::path::Path;

use super::{FORMAT, Meta, PreferenceKind, RecordKind, TokenDataset, TokenType};
use crate::stamps::{self, Stamp};
use ottava_common::hash::{seal, sha256_file};

/// Writes three documents of 2, 1 and 3 tokens, in two files.
fn sample(folder: &Path, dtype: TokenType) -> Meta {
    let tokens = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()[..dtype.size()].to_vec()).collect::<Vec<u8>>();
    std::fs::write(folder.join("tokens-00000.bin"), tokens(&[5, 0, 0])).unwrap();
    std::fs::write(folder.join("tokens-00001.bin"), tokens(&[9, 8, 0])).unwrap();
    std::fs::write(folder.join("documents.bin"), [0_u64, 2, 3, 6].map(u64::to_le_bytes).concat()).unwrap();
    std::fs::write(folder.join("bytes.bin"), [1_u32, 0, 7].map(u32::to_le_bytes).concat()).unwrap();
    let meta = Meta {
        format: FORMAT,
        key: "k".into(),
        documents: 3,
        tokens: 6,
        target_tokens: 6,
        loss_mask: false,
        kind: RecordKind::Documents,
        margins: false,
        bytes: 8,
        dtype,
        vocab_size: 10,
        eos_id: 0,
        tokenizer_sha256: String::new(),
        shards: vec![3, 3],
        sha256: hashes(folder),
        sources: Vec::new(),
    };
    write_meta(folder, &meta);
    meta
}

fn hashes(folder: &Path) -> BTreeMap<String, String> {
    let files = ["tokens-00000.bin", "tokens-00001.bin", "documents.bin", "bytes.bin"];
    files.into_iter().map(|name| (name.to_string(), sha256_file(&folder.join(name)).unwrap().1)).collect()
}

fn write_meta(folder: &Path, meta: &Meta) {
    std::fs::write(folder.join("meta.json"), seal(meta)).unwrap();
}

/// Returns the error of opening a valid folder after `damage`.
fn error_after(damage: impl FnOnce(&Path, Meta)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let meta = sample(folder.path(), TokenType::U16);
    damage(folder.path(), meta);
    let error = TokenDataset::open(folder.path()).err().expect("the damage to be noticed");
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn both_token_types_read_back() {
    for dtype in [TokenType::U16, TokenType::U32] {
        let folder = tempfile::tempdir().unwrap();
        sample(folder.path(), dtype);
        let dataset = TokenDataset::open(folder.path()).unwrap();
        let all: Vec<_> = (0..dataset.len()).map(|i| dataset.document(i).unwrap()).collect();
        assert_eq!(all, [vec![5, 0], vec![0], vec![9, 8, 0]]);
        assert_eq!((dataset.total_tokens(), dataset.total_bytes(), dataset.document_bytes(2).unwrap()), (6, 8, 7));
    }
    assert_eq!((TokenType::for_vocab(65_536), TokenType::for_vocab(65_537)), (TokenType::U16, TokenType::U32));
}

#[test]
fn damaged_offsets_are_named_by_document() {
    let offsets = |starts: [u64; 4]| {
        error_after(|folder, meta| {
            std::fs::write(folder.join("documents.bin"), starts.map(u64::to_le_bytes).concat()).unwrap();
            write_meta(folder, &Meta { sha256: hashes(folder), ..meta });
        })
    };
    const LAST: &str = "documents.bin: the last document spans two files of tokens or ends before the last token";
    assert_eq!(offsets([0, 3, 2, 6]), "documents.bin: document 1 has the token range 3..2");
    assert_eq!(offsets([0, 3, 3, 6]), "documents.bin: document 1 has the token range 3..3");
    assert_eq!(offsets([1, 2, 3, 6]), "documents.bin: document 0 has the token range 1..2");
    assert_eq!(offsets([0, 2, 3, u64::MAX]), format!("documents.bin: document 2 has the token range 3..{}", u64::MAX));
    assert_eq!(offsets([0, 2, 3, 5]), LAST);
    assert_eq!(offsets([0, 2, 4, 6]), "documents.bin: document 1 spans two files of tokens");
    assert_eq!(offsets([0, 1, 2, 6]), LAST);
}

#[test]
fn ids_beyond_the_vocabulary_are_named_by_document() {
    let message = error_after(|folder, meta| write_meta(folder, &Meta { vocab_size: 9, ..meta }));
    assert_eq!(message, "tokens-00001.bin: document 2 has the id 9 at token 0, the vocabulary has 9");
}

#[test]
fn wrong_sizes_counts_and_versions_are_noticed() {
    let cut = |name: &'static str| error_after(move |folder, _| std::fs::write(folder.join(name), [0; 5]).unwrap());
    assert!(cut("tokens-00001.bin").starts_with("tokens-00001.bin: 5 bytes, meta.json promises 6"));
    assert!(cut("documents.bin").starts_with("documents.bin: 5 bytes, meta.json promises 32"));
    assert!(cut("bytes.bin").starts_with("bytes.bin: 5 bytes, meta.json promises 12"));
    let missing = error_after(|folder, _| std::fs::remove_file(folder.join("tokens-00000.bin")).unwrap());
    assert!(missing.starts_with("tokens-00000.bin: "), "{missing}");
    let meta = |change: fn(Meta) -> Meta| error_after(|folder, meta| write_meta(folder, &change(meta)));
    assert!(meta(|m| Meta { loss_mask: true, ..m }).contains("no room for a loss mask"));
    assert!(meta(|m| Meta { format: 1, ..m }).contains("format 1, this program reads 6"));
    assert!(meta(|m| Meta { tokens: 7, ..m }).contains("do not agree"));
    assert!(meta(|m| Meta { documents: 0, ..m }).contains("do not agree"));
    assert!(meta(|m| Meta { documents: u64::MAX, ..m }).contains("documents.bin: 32 bytes"));
    assert!(meta(|m| Meta { shards: vec![u64::MAX, 7], tokens: 6, ..m }).contains("do not agree"));
    assert!(meta(|m| Meta { shards: vec![3, 0, 3], ..m }).contains("tokens-00001.bin: 6 bytes"));
    assert!(meta(|m| Meta { bytes: 9, ..m }).contains("bytes.bin: the sum is 8, meta.json says 9"));
    assert!(error_after(|folder, _| std::fs::write(folder.join("meta.json"), "{").unwrap()).contains("not valid JSON"));
    assert!(
        error_after(|folder, _| std::fs::write(folder.join("meta.json"), "{\"format\":6}").unwrap())
            .contains("checksum")
    );
}

#[test]
fn kinds_of_records_are_those_of_earlier_folders_too() {
    let folder = tempfile::tempdir().unwrap();
    let meta = sample(folder.path(), TokenType::U16);
    let written = serde_json::to_value(&meta).unwrap();
    let read = |key: &str, kind: &str| {
        let mut object = written.clone();
        object[key] = kind.into();
        serde_json::from_value::<Meta>(object).map(|meta| meta.kind)
    };
    assert!(written.get("kind").is_none());
    assert_eq!(serde_json::from_value::<Meta>(written.clone()).unwrap(), meta);
    for (name, kind) in [
        ("pairs", RecordKind::Preferences(PreferenceKind::Pairs)),
        ("labels", RecordKind::Preferences(PreferenceKind::Labels)),
        ("prompts", RecordKind::Prompts),
    ] {
        assert_eq!(serde_json::json!(kind), name);
        assert_eq!([read("kind", name).unwrap(), read("preference", name).unwrap()], [kind; 2]);
    }
    assert!(read("kind", "songs").is_err());
}

#[test]
fn changed_bytes_are_noticed_in_every_file() {
    for name in ["tokens-00000.bin", "documents.bin", "bytes.bin", "meta.json"] {
        let error = error_after(|folder, _| {
            let mut bytes = std::fs::read(folder.join(name)).unwrap();
            // The first id becomes another id of the vocabulary.
            bytes[0] ^= 1;
            std::fs::write(folder.join(name), bytes).unwrap();
        });
        assert!(error.starts_with(&format!("{name}: ")), "{error}");
    }
}

#[test]
fn checked_files_are_not_read_again_until_one_changes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    sample(folder.path(), TokenType::U16);
    TokenDataset::open(folder.path()).unwrap();
    assert!(path("checked.json").exists());
    // The file has an id beyond the vocabulary, but its stamp says that it was checked.
    std::fs::write(path("tokens-00001.bin"), [200, 0, 8, 0, 0, 0]).unwrap();
    let error = TokenDataset::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("document 2 has the id 200 at token 0"), "{error}");
    let names = ["tokens-00000.bin", "tokens-00001.bin", "documents.bin", "bytes.bin", "meta.json"];
    let stamps: BTreeMap<_, _> = names.into_iter().map(|name| (name, Stamp::of(&path(name)).unwrap())).collect();
    stamps::write(&path("checked.json"), &stamps);
    let dataset = TokenDataset::open(folder.path()).unwrap();
    assert_eq!(dataset.document(0).unwrap(), [5, 0]);
    let error = dataset.document(2).unwrap_err().to_string();
    assert!(error.contains("document 2 has the id 200, the vocabulary has 10"), "{error}");
    assert!(dataset.check().is_err());
    // The file is written again with the same bytes and the same time. Only the time of the last status change differs.
    let times = std::fs::metadata(path("bytes.bin")).unwrap().modified().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(path("bytes.bin"), std::fs::read(path("bytes.bin")).unwrap()).unwrap();
    std::fs::File::options().append(true).open(path("bytes.bin")).unwrap().set_modified(times).unwrap();
    assert!(TokenDataset::open(folder.path()).is_err());
}
