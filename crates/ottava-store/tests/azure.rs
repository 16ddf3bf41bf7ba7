//! Tests a container of Azure with a stand-in that keeps blocks and blobs. `scripts/check_stores.py` compares with the emulator Azurite.

use ottava_common::Error;
use ottava_http::Retry;
use ottava_http::testing::{Received, Server, reply, reply_bytes};
use ottava_store::{Bucket, Object};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Mutex;
use std::time::Duration;

/// The blobs of a page of a listing.
const PAGE: usize = 2;

/// Blobs, and blocks that are part of no blob yet.
#[derive(Default)]
struct Container {
    blobs: BTreeMap<String, Vec<u8>>,
    blocks: BTreeMap<(String, String), Vec<u8>>,
}

impl Container {
    fn answer(&mut self, request: &Received) -> Vec<u8> {
        let is_signed = request.header("authorization").is_some_and(|text| text.starts_with("SharedKey otter:"));
        if !is_signed || request.header("x-ms-date").is_none() || request.header("x-ms-version").is_none() {
            return reply(403, "", "<Error><Code>AuthenticationFailed</Code></Error>");
        }
        let (method, target) = request.target();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let parameter = |name: &str| {
            let found = query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            found.map(|value| value.replace("%3D", "=").replace("%2F", "/"))
        };
        let name = path.trim_start_matches("/runs/").to_string();
        match (method, parameter("comp").as_deref()) {
            ("PUT", Some("block")) => {
                self.blocks.insert((name, parameter("blockid").unwrap()), request.bytes.clone());
                reply(201, "", "")
            }
            ("PUT", Some("blocklist")) => {
                let ids = request.body.split("<Latest>").skip(1).map(|rest| rest.split('<').next().unwrap());
                let blocks: Option<Vec<_>> =
                    ids.map(|id| self.blocks.remove(&(name.clone(), id.to_string()))).collect();
                self.blobs.insert(name, blocks.expect("all blocks were put").concat());
                reply(201, "", "")
            }
            ("PUT", None) if request.header("x-ms-blob-type") == Some("BlockBlob") => {
                self.blobs.insert(name, request.bytes.clone());
                reply(201, "", "")
            }
            ("GET", Some("list")) => self.list(&parameter("prefix").unwrap(), &parameter("marker").unwrap_or_default()),
            ("GET", None) => {
                self.blobs.get(&name).map_or_else(|| reply(404, "", ""), |blob| reply_bytes(200, "", blob))
            }
            ("DELETE", None) => match self.blobs.remove(&name) {
                Some(_) => reply(202, "", ""),
                None => reply(404, "", "<Error><Code>BlobNotFound</Code></Error>"),
            },
            _ => reply(400, "", "<Error><Code>InvalidHeaderValue</Code></Error>"),
        }
    }

    fn list(&self, prefix: &str, after: &str) -> Vec<u8> {
        let mut found = self.blobs.iter().filter(|(name, _)| name.starts_with(prefix) && name.as_str() > after);
        let page: Vec<_> = found.by_ref().take(PAGE).collect();
        let blob = |(name, bytes): &(&String, &Vec<u8>)| {
            let size = bytes.len();
            format!(
                "<Blob><Name>{name}</Name><Properties><Etag>0x{size}</Etag><Content-Length>{size}</Content-Length></Properties></Blob>"
            )
        };
        let blobs: String = page.iter().map(blob).collect();
        let next = match (found.next(), page.last()) {
            (Some(_), Some((last, _))) => format!("<NextMarker>{last}</NextMarker>"),
            _ => "<NextMarker></NextMarker>".to_string(),
        };
        reply(200, "", &format!("<EnumerationResults><Blobs>{blobs}</Blobs>{next}</EnumerationResults>"))
    }
}

fn bucket(server: &Server, account: &str) -> Bucket {
    let (account, url) = (account.to_string(), server.url(""));
    let variable = move |name: &str| match name {
        "AZURE_STORAGE_ACCOUNT" => Some(account.clone()),
        "AZURE_STORAGE_KEY" => Some("a2V5".to_string()),
        "AZURE_STORAGE_ENDPOINT" => Some(url.clone()),
        _ => None,
    };
    let retry = Retry { attempts: 2, first_pause: Duration::from_millis(1) };
    Bucket::with_variables("setting", "az://runs/first", &variable).unwrap().with_retry(retry).with_parts(1000, 400)
}

#[test]
fn blobs_are_put_in_blocks_listed_in_pages_read_and_deleted() {
    let container = Mutex::new(Container::default());
    let server = Server::start(move |_, request| container.lock().unwrap().answer(request));
    let (bucket, folder) = (bucket(&server, "otter"), tempfile::tempdir().unwrap());
    let (path, back) = (folder.path().join("file"), folder.path().join("back"));
    let contents: Vec<Vec<u8>> =
        [0, 1000, 1001, 4003].map(|size| (0..size).map(|at| (at % 251) as u8).collect()).to_vec();
    for (content, number) in contents.iter().zip(0..) {
        fs::write(&path, content).unwrap();
        bucket.put_file(&format!("part/{number}.bin"), &fs::File::open(&path).unwrap()).unwrap();
        bucket.get_file(&format!("part/{number}.bin"), content.len() as u64, &back).unwrap();
        assert_eq!(&fs::read(&back).unwrap(), content);
    }
    let blocks = server.received().iter().filter(|request| request.target().1.contains("comp=block&")).count()
        + server.received().iter().filter(|request| request.target().1.ends_with("comp=block")).count();
    assert_eq!(blocks, 3 + 11, "files of more than 1000 bytes have blocks of 400");
    let listed = bucket.list("part/").unwrap();
    let listed: Vec<(String, u64)> = listed.into_iter().map(|Object { name, size, .. }| (name, size)).collect();
    let expected =
        contents.iter().zip(0..).map(|(content, number)| (format!("part/{number}.bin"), content.len() as u64));
    assert_eq!(listed, expected.collect::<Vec<_>>());
    bucket.give_up_uploads("").unwrap();
    bucket.delete("part/0.bin").unwrap();
    bucket.delete("part/0.bin").unwrap();
    assert_eq!(bucket.get("part/0.bin").unwrap(), None);
}

#[test]
fn a_refusal_names_the_variables_of_azure() {
    let container = Mutex::new(Container::default());
    let server = Server::start(move |_, request| container.lock().unwrap().answer(request));
    let error = bucket(&server, "badger").put("name", b"text").unwrap_err();
    assert!(
        matches!(&error, Error::External(text) if text.contains("AuthenticationFailed") && text.contains("AZURE_STORAGE_KEY")),
        "{error}"
    );
}
