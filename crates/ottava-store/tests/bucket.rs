//! Tests a bucket with a store that fails.

use ottava_common::Error;
use ottava_http::Retry;
use ottava_store::testing::FakeStore;
use ottava_store::{Bucket, Object};
use std::fs;
use std::time::Duration;

fn bucket(store: &FakeStore, id: &str) -> Bucket {
    let (id, url) = (id.to_string(), store.url());
    let variable = move |name: &str| match name {
        "AWS_ACCESS_KEY_ID" => Some(id.clone()),
        "AWS_SECRET_ACCESS_KEY" => Some("secret".to_string()),
        "AWS_ENDPOINT_URL" => Some(url.clone()),
        _ => None,
    };
    let retry = Retry { attempts: 3, first_pause: Duration::from_millis(1) };
    Bucket::with_variables("setting", "s3://runs/first", &variable).unwrap().with_retry(retry).with_parts(1000, 400)
}

#[test]
fn objects_are_put_listed_read_and_deleted() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let bucket = bucket(&store, "id");
    let (path, back) = (folder.path().join("file"), folder.path().join("back"));
    store.fail(2);
    let contents: Vec<Vec<u8>> =
        [0, 1, 1000, 1001, 4003].map(|size| (0..size).map(|at| (at % 251) as u8).collect()).to_vec();
    for (content, number) in contents.iter().zip(0..) {
        fs::write(&path, content).unwrap();
        bucket.put_file(&format!("a b/{number}&.bin"), &fs::File::open(&path).unwrap()).unwrap();
    }
    bucket.put("c", b"text").unwrap();
    assert_eq!(store.objects()["runs/first/c"], b"text");
    for (content, number) in contents.iter().zip(0..) {
        bucket.get_file(&format!("a b/{number}&.bin"), content.len() as u64, &back).unwrap();
        assert_eq!(&fs::read(&back).unwrap(), content);
    }
    // Listings have pages.
    let listed = bucket.list("a b/").unwrap();
    let listed: Vec<(String, u64)> = listed.into_iter().map(|Object { name, size, .. }| (name, size)).collect();
    let expected = contents
        .iter()
        .zip(0..)
        .map(|(content, number): (_, u32)| (format!("a b/{number}&.bin"), content.len() as u64));
    assert_eq!(listed, expected.collect::<Vec<_>>());
    assert_eq!(bucket.get("c").unwrap().as_deref(), Some(b"text".as_slice()));
    bucket.delete("c").unwrap();
    bucket.delete("c").unwrap();
    assert_eq!(bucket.get("c").unwrap(), None);
    // Files of more than 1000 bytes were put in parts.
    let parts = store.received().iter().filter(|request| request.target().1.contains("partNumber=")).count();
    assert_eq!((parts, store.open_uploads()), (3 + 11, 0));
}

#[test]
fn copies_are_made_once_per_content() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let bucket = bucket(&store, "id");
    for number in 0..7 {
        store.set(&format!("runs/first/data/{number}.txt"), Some(format!("text {number}").as_bytes()));
    }
    let copies = || {
        let mut seen = (0, 0);
        let objects = bucket.list("data/").unwrap();
        let tree = bucket.copies(&objects, "data/", folder.path(), &mut |done, total| seen = (done, total)).unwrap();
        let read = |number| fs::read_to_string(tree.join(format!("{number}.txt"))).unwrap();
        ((0..7).map(read).collect::<Vec<_>>(), seen)
    };
    let (texts, seen) = copies();
    assert_eq!((texts[6].as_str(), seen), ("text 6", (42, 42)));
    let gets = || store.received().iter().filter(|request| request.target().1.ends_with(".txt")).count();
    assert_eq!(gets(), 7);
    // One object has changed, although its size is the same.
    store.set("runs/first/data/2.txt", Some(b"other."));
    assert_eq!(copies().0[2], "other.");
    assert_eq!(gets(), 8);
}

#[test]
fn copies_of_one_call_share_a_folder_which_no_name_leaves() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let bucket = bucket(&store, "id");
    for name in ["a/x.bin", "a/x.idx", "b/x.bin"] {
        store.set(&format!("runs/first/data/{name}"), Some(name.as_bytes()));
    }
    let copies = || bucket.copies(&bucket.list("data/").unwrap(), "data/", folder.path(), &mut |_, _| {});
    let tree = copies().unwrap();
    for name in ["a/x.bin", "a/x.idx", "b/x.bin"] {
        assert_eq!(fs::read_to_string(tree.join(name)).unwrap(), name);
    }
    store.set("runs/first/data/../../x", Some(b"x"));
    assert!(matches!(copies(), Err(Error::Data(text)) if text.contains("no path")));
}

#[test]
fn a_store_that_refuses_says_what_to_check_and_leaves_no_parts() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let error = bucket(&store, "other").put("c", b"text").unwrap_err();
    assert!(
        matches!(&error, Error::External(text) if text.contains("403") && text.contains("AWS_ACCESS_KEY_ID")),
        "{error}"
    );
    let bucket = bucket(&store, "id");
    let path = folder.path().join("file");
    fs::write(&path, vec![1; 2000]).unwrap();
    // A cut answer of another size is no file.
    store.set("runs/first/x", Some(b"short"));
    assert!(bucket.get_file("x", 6, &folder.path().join("x")).unwrap_err().to_string().contains("5 of 6 bytes"));
    assert!(bucket.get_file("absent", 6, &folder.path().join("x")).unwrap_err().to_string().contains("404"));
    store.fail(1000);
    assert!(bucket.put_file("big", &fs::File::open(&path).unwrap()).is_err());
    store.fail(0);
    assert!(!store.objects().contains_key("runs/first/big"));
    // The second part fails three times, and the upload is given up.
    let seen = store.received().len();
    store.fail_at(seen + 3..seen + 6);
    assert!(bucket.put_file("big", &fs::File::open(&path).unwrap()).is_err());
    assert_eq!(store.open_uploads(), 0);
    // So are the parts of a killed process.
    store.fail_at(seen + 10..usize::MAX);
    assert!(bucket.put_file("big", &fs::File::open(&path).unwrap()).is_err());
    store.fail_at(0..0);
    assert_eq!(store.open_uploads(), 1);
    bucket.give_up_uploads("b").unwrap();
    assert_eq!(store.open_uploads(), 0);
}

#[test]
fn all_pages_of_left_uploads_are_given_up() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let (bucket, path) = (bucket(&store, "id"), folder.path().join("file"));
    fs::write(&path, vec![1; 2000]).unwrap();
    for number in 0..5 {
        // The list and the begin of the upload succeed.
        store.fail_at(store.received().len() + 2..usize::MAX);
        bucket.put_file(&format!("big/{number}"), &fs::File::open(&path).unwrap()).unwrap_err();
    }
    store.fail_at(0..0);
    assert_eq!(store.open_uploads(), 5);
    bucket.give_up_uploads("big/").unwrap();
    assert_eq!(store.open_uploads(), 0);
}

#[test]
fn a_lost_answer_to_the_end_of_an_upload_is_no_fault() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    let (bucket, path) = (bucket(&store, "id"), folder.path().join("file"));
    for content in [1, 2] {
        fs::write(&path, vec![content; 2000]).unwrap();
        store.lose_answer();
        bucket.put_file("big", &fs::File::open(&path).unwrap()).unwrap();
        assert_eq!(store.objects()["runs/first/big"], vec![content; 2000]);
    }
}

#[test]
fn an_object_that_is_larger_than_its_size_is_refused() {
    let (store, folder) = (FakeStore::start(), tempfile::tempdir().unwrap());
    store.set("runs/first/x", Some(b"longer"));
    let path = folder.path().join("x");
    let error = bucket(&store, "id").get_file("x", 4, &path).unwrap_err().to_string();
    assert!(error.contains("more than 4 bytes"), "{error}");
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}
