//! `POST /invocations`, the one path that SageMaker calls: the fields of a request tell which path answers it.

use serde::Deserialize;
use serde::de::IgnoredAny;

/// A path that answers requests of `/invocations`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Invoked {
    Chat,
    Completions,
    Embeddings,
    Rerank,
    Score,
}

/// The fields that tell the path.
#[derive(Default, Deserialize)]
struct Fields {
    messages: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    input: Option<IgnoredAny>,
    query: Option<IgnoredAny>,
    text_1: Option<IgnoredAny>,
    queries: Option<IgnoredAny>,
}

/// Returns the path that answers a body. A body without any of the fields goes to the chats, whose error names the field that is missing.
pub fn invoked(body: &[u8]) -> Invoked {
    let Fields { messages, prompt, input, query, text_1, queries } = serde_json::from_slice(body).unwrap_or_default();
    let paths = [
        (messages, Invoked::Chat),
        (prompt, Invoked::Completions),
        (input, Invoked::Embeddings),
        (query, Invoked::Rerank),
        (text_1.or(queries), Invoked::Score),
    ];
    paths.into_iter().find(|(field, _)| field.is_some()).map_or(Invoked::Chat, |(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_body_tell_its_path() {
        for (body, path) in [
            (r#"{"model": "m", "messages": []}"#, Invoked::Chat),
            (r#"{"messages": null, "prompt": "a"}"#, Invoked::Completions),
            (r#"{"input": ["a"]}"#, Invoked::Embeddings),
            (r#"{"query": "a", "documents": []}"#, Invoked::Rerank),
            (r#"{"queries": "a", "documents": []}"#, Invoked::Score),
            ("[1", Invoked::Chat),
        ] {
            assert_eq!(invoked(body.as_bytes()), path, "{body}");
        }
    }
}
