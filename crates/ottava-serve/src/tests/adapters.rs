//! Tests adapters that are loaded and unloaded while the server runs.

use super::*;
use crate::models::OpenAdapters;
use std::sync::mpsc::{Receiver, Sender};

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

/// Opens adapters whose path does not begin with `missing` or `wrong`, after a message of `wait` for a path that begins with `slow`.
fn opener(wait: Receiver<()>) -> OpenAdapters {
    let wait = Mutex::new(wait);
    Arc::new(move |folder| {
        let path = folder.display().to_string();
        if path.starts_with("missing") {
            let source = std::io::Error::new(std::io::ErrorKind::NotFound, "there is no adapter");
            return Err(ottava_common::Error::Io { path, source });
        }
        if path.starts_with("wrong") {
            return Err(ottava_common::Error::Model(format!("{path}: the adapter is of another model")));
        }
        if path.starts_with("slow") {
            wait.lock().unwrap().recv().unwrap();
        }
        Ok(Box::new(|_| panic!("the stand-in has no model")))
    })
}

fn with_opener(change: impl FnOnce(&mut Options, &mut Parrot)) -> (Server, Sender<()>) {
    let (done, wait) = channel();
    (start_with(change, |model| model.open_adapters = Some(opener(wait))), done)
}

fn names(server: &Server) -> Vec<String> {
    let models: Value = serde_json::from_str(&server.call("/v1/models", None, None).1).unwrap();
    models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_string()).collect()
}

#[test]
fn adapters_are_loaded_and_unloaded_and_requests_in_progress_finish() {
    let (server, _done) = with_opener(|_, parrot| parrot.pause = Duration::from_millis(10));
    let load = |body: Value| server.call(LOAD, Some(&body), None);
    let sea = json!({"lora_name": "sea", "lora_path": "adapters/sea"});
    assert_eq!(load(sea.clone()).0, 200);
    assert_eq!(names(&server), ["parrot", "sea"]);
    let model: Value = serde_json::from_str(&server.call("/v1/models/sea", None, None).1).unwrap();
    assert_eq!((&model["root"], &model["parent"]), (&json!("adapters/sea"), &json!("parrot")));
    // A request that uses the adapter goes on after the adapter has gone, and frees it at its end.
    let body = json!({"model": "sea", "prompt": "a bird", "max_tokens": 60});
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.post("/v1/completions", body.clone()));
        server.log.wait("the request has begun", |log| log.requests.iter().any(|request| request.adapter.is_some()));
        assert_eq!(server.call(UNLOAD, Some(&json!({"lora_name": "sea"})), None).0, 200);
        assert_eq!(names(&server), ["parrot"]);
        assert!(server.log.get(|log| log.removed.is_empty()));
        assert_eq!(server.refused("/v1/completions", &body).0, 404);
        assert_eq!(answer.join().unwrap()["usage"]["completion_tokens"], 60);
    });
    server.log.wait("the adapter is freed", |log| log.removed == [AdapterId(0)]);
    // An adapter replaces another one of its name only if that is asked for.
    assert_eq!(load(sea.clone()).0, 200);
    let mut again = sea.clone();
    assert_eq!(load(again.clone()).0, 400);
    again["load_inplace"] = true.into();
    assert_eq!(load(again).0, 200);
    server.log.wait("the first one is freed", |log| log.removed == [AdapterId(0), AdapterId(1)]);
    assert_eq!(names(&server), ["parrot", "sea"]);
}

#[test]
fn requests_are_answered_while_an_adapter_is_opened() {
    let (server, done) = with_opener(|_, _| {});
    std::thread::scope(|scope| {
        let load =
            scope.spawn(|| server.call(LOAD, Some(&json!({"lora_name": "sea", "lora_path": "slow/sea"})), None).0);
        let answer = server.post("/v1/completions", json!({"prompt": "a bird", "max_tokens": 3}));
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        assert!(!load.is_finished() && server.log.get(|log| log.loaded == 0));
        done.send(()).unwrap();
        assert_eq!(load.join().unwrap(), 200);
    });
    assert_eq!(names(&server), ["parrot", "sea"]);
}

#[test]
fn adapters_that_cannot_be_changed_are_errors() {
    let (server, _done) = with_opener(|_, _| {});
    for (path, body, status, words) in [
        (LOAD, json!({"lora_path": "a"}), 400, "`lora_name` is missing"),
        (LOAD, json!({"lora_name": "a"}), 400, "`lora_path` is missing"),
        (LOAD, json!({"lora_name": "", "lora_path": "a"}), 400, "`lora_name` is missing"),
        (LOAD, json!({"lora_name": "a", "lora_path": "missing/a"}), 404, "missing/a: there is no adapter"),
        (LOAD, json!({"lora_name": "a", "lora_path": "wrong/a"}), 400, "wrong/a: the adapter is of another model"),
        (LOAD, json!({"lora_name": "parrot", "lora_path": "a", "load_inplace": true}), 400, "already a model `parrot`"),
        (UNLOAD, json!({}), 400, "`lora_name` is missing"),
        (UNLOAD, json!({"lora_name": "a"}), 404, "there is no adapter `a`"),
        (UNLOAD, json!({"lora_name": "parrot"}), 404, "there is no adapter `parrot`"),
    ] {
        let (found, error) = server.refused(path, &body);
        assert_eq!(found, status, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    // A field that no adapter needs is not accepted in silence.
    let (strict, _done) = with_opener(|options, _| options.strict = true);
    for (path, field) in [(LOAD, "base_model_name"), (UNLOAD, "lora_int_id")] {
        let (status, error) = strict.refused(path, &json!({"lora_name": "a", field: "b"}));
        assert!(status == 400 && error["message"].as_str().unwrap().contains(field), "{error}");
    }
    let fixed = start(|_, _| {});
    for path in [LOAD, UNLOAD] {
        let (status, error) = fixed.refused(path, &json!({"lora_name": "a", "lora_path": "a"}));
        assert!(
            status == 404 && error["message"].as_str().unwrap().contains("--allow-runtime-lora-updating"),
            "{error}"
        );
    }
}
