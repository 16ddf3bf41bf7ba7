use super::*;
use std::path::PathBuf;

fn formats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats")
}

fn read(path: &Path) -> Result<Vec<Vec<u32>>, String> {
    let mut reader = MegatronReader::open(path).map_err(|error| error.to_string())?;
    let mut documents = Vec::new();
    while let Some((ids, number)) = reader.next()? {
        documents.push(ids);
        assert_eq!(number, documents.len() as u64);
    }
    Ok(documents)
}

#[test]
fn documents_of_megatron_are_read() {
    assert_eq!(read(&formats().join("ids.bin")).unwrap(), [vec![5, 6, 7, 8], vec![9, 300], vec![11]]);
}

#[test]
fn damaged_indexes_are_errors_and_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    std::fs::copy(formats().join("ids.bin"), &path).unwrap();
    let good = std::fs::read(formats().join("ids.idx")).unwrap();
    let with = |bytes: &[u8]| {
        std::fs::write(folder.path().join("a.idx"), bytes).unwrap();
        read(&path)
    };
    assert_eq!(with(&good).unwrap().len(), 3);
    for length in 0..good.len() {
        assert!(with(&good[..length]).is_err(), "cut to {length}");
    }
    // Each case damages the type of tokens, or a count, length or offset that then exceeds the file.
    for (at, value, says) in [
        (17, 6, "the type 6"),
        (25, 0x7f, "damaged"),
        (34, 200, "ends beyond"),
        (52, 1, "ends beyond"),
        (70, 9, "damaged"),
    ] {
        let mut bytes = good.clone();
        bytes[at] = value;
        let error = with(&bytes).unwrap_err();
        assert!(error.contains(says), "byte {at}: {error}");
    }
    for at in 0..good.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= flip;
            let _ = with(&bytes);
        }
    }
}
