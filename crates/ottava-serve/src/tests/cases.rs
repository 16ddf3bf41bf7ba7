//! Runs the table of cases that tests of vLLM and llama.cpp inspired, except for rows that need a model, or that do not hold. `scripts/check_cases.py` runs
//! all of them with a model.

use super::*;

const TABLE: &str = include_str!("cases.jsonl");

/// Replaces objects with `$repeat` by long texts.
fn expanded(value: &Value) -> Value {
    match value {
        Value::Object(fields) => match (fields.get("$repeat"), fields.get("times")) {
            (Some(text), Some(times)) => text.as_str().unwrap().repeat(times.as_u64().unwrap() as usize).into(),
            _ => fields
                .iter()
                .map(|(name, value)| (name.clone(), expanded(value)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        },
        Value::Array(list) => list.iter().map(expanded).collect(),
        value => value.clone(),
    }
}

/// A streamed answer as one value: its events, what is counted in them, and the last of them.
fn of_stream(text: &str) -> Value {
    let data = text.split("\n\n").filter_map(|event| event.lines().find_map(|line| line.strip_prefix("data: ")));
    let data: Vec<&str> = data.collect();
    let done = data.last() == Some(&"[DONE]");
    let events: Vec<Value> = data.iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
    let choices = || events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten());
    let finishes = choices().filter(|choice| choice["finish_reason"].is_string()).count();
    let usages = events.iter().filter(|event| event["usage"].is_object()).count();
    let texts = choices().filter_map(|choice| choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()));
    let (text, last) = (texts.collect::<String>(), events.last().cloned());
    json!({"done": done, "finishes": finishes, "usages": usages, "text": text, "count": events.len(), "last": last, "events": events})
}

/// Whether `found` is as a check with this word asks.
fn holds(answer: &Value, found: &Value, word: &str, asked: &Value) -> bool {
    let length = |value: &Value| {
        value
            .as_str()
            .map(str::len)
            .or_else(|| value.as_array().map(Vec::len))
            .or_else(|| value.as_object().map(serde_json::Map::len))
    };
    let size = || length(found).map(|length| length as f64).or_else(|| found.as_f64());
    let text = || found.as_str().unwrap_or_default();
    match word {
        "is" => found == asked || found.as_f64().is_some_and(|number| Some(number) == asked.as_f64()),
        "len" => length(found).map(|length| length as u64) == asked.as_u64(),
        "at_least" => size() >= asked.as_f64(),
        "kind" => match asked.as_str().unwrap() {
            "string" => found.is_string(),
            "number" => found.is_number(),
            "list" => found.is_array(),
            other => panic!("{other}"),
        },
        "begins" => text().starts_with(asked.as_str().unwrap()),
        "has" => text().contains(asked.as_str().unwrap()),
        "among" => asked.as_array().unwrap().contains(found),
        "same" => Some(found) == answer.pointer(asked.as_str().unwrap()),
        other => panic!("there is no check {other}"),
    }
}

/// Returns what is wrong with the answer to a row.
fn wrong(server: &Server, row: &Value) -> Option<String> {
    let body = row.get("body").map(expanded);
    let path = row["path"].as_str().unwrap();
    let (status, text) = match &row["headers"]["Content-Type"] {
        Value::String(kind) => {
            let post = agent().post(format!("http://{}{path}", server.address)).header("Content-Type", kind);
            let mut response = post.send(body.unwrap().to_string()).unwrap();
            (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
        }
        _ => server.call(path, body.as_ref(), None),
    };
    if Some(u64::from(status)) != row["status"].as_u64() {
        return Some(format!("status {status}: {text}"));
    }
    let is_stream = row["body"]["stream"] == true && status == 200;
    let answer = if is_stream { of_stream(&text) } else { serde_json::from_str(&text).unwrap() };
    let checks = row["checks"].as_array().unwrap().iter();
    let failed = |check: &&Value| {
        let found = answer.pointer(check[0].as_str().unwrap()).unwrap_or(&Value::Null);
        !holds(&answer, found, check[1].as_str().unwrap(), &check[2])
    };
    checks.clone().find(failed).map(|check| format!("{check}: {answer}"))
}

#[test]
fn requests_of_other_servers_tests_are_answered_alike() {
    let server = start(|_, _| {});
    let rows: Vec<Value> = TABLE.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let is_here = |row: &&Value| row["engine"] != true && row["unmet"].is_null();
    let found =
        rows.iter().filter(is_here).filter_map(|row| Some(format!("{}: {}", row["case"], wrong(&server, row)?)));
    let found: Vec<String> = found.collect();
    assert!(found.is_empty(), "{} of {}:\n{}", found.len(), rows.len(), found.join("\n"));
    // A status alone says little about an error.
    let is_bare = |row: &&Value| row["status"] != 200 && row["unmet"].is_null() && row["checks"] == json!([]);
    assert_eq!(rows.iter().find(is_bare), None);
    // An answer does not depend on chance: it is the likeliest text, or its draws have a seed.
    let draws = |row: &&Value| {
        row["status"] == 200 && row["body"].is_object() && !row["path"].as_str().unwrap().ends_with("tokenize")
    };
    let is_chance = |row: &&Value| draws(row) && row["body"]["temperature"] != 0 && row["body"]["seed"].is_null();
    assert_eq!(rows.iter().find(is_chance), None);
    // Most rows of vLLM hold, and all rows have their own name.
    let of_vllm = |row: &&Value| row["of"].as_str().unwrap().starts_with("vllm");
    let unmet = rows.iter().filter(of_vllm).filter(|row| !row["unmet"].is_null()).count();
    assert!(unmet * 10 <= rows.iter().filter(of_vllm).count(), "{unmet} rows of vLLM do not hold");
    let names: std::collections::BTreeSet<String> =
        rows.iter().map(|row| format!("{} {}", row["of"], row["case"])).collect();
    assert_eq!(names.len(), rows.len());
}
