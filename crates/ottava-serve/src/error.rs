//! Errors in the form of OpenAI's API.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ottava_data::write_json;
use serde_json::json;

/// A request that failed.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The name of the field that is wrong.
    param: Option<String>,
    /// The code of the error, for programs.
    code: Option<&'static str>,
}

pub type Result<T> = std::result::Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None }
    }

    /// Returns the error for a request with an invalid value.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Returns the error for a field that cannot be used.
    pub fn field(name: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(name.into()), ..ApiError::invalid(message) }
    }

    /// Returns the error for a token without a row in the model's embedding.
    pub fn no_token(field: &str, id: u32, vocabulary: usize) -> ApiError {
        ApiError::field(field, format!("there is no token {id}; the vocabulary ends at {vocabulary}"))
    }

    /// Returns the error for more tokens than the model has room for.
    pub fn too_long(name: &str, message: impl Into<String>) -> ApiError {
        ApiError { code: Some("context_length_exceeded"), ..ApiError::field(name, message) }
    }

    /// Returns the error for a model that is not among the `served` models.
    pub fn no_model(asked: &str, served: &str) -> ApiError {
        let message = format!("the model `{asked}` does not exist here; this server has {served}");
        let error = ApiError::new(StatusCode::NOT_FOUND, message);
        ApiError { param: Some("model".into()), code: Some("model_not_found"), ..error }
    }

    /// Returns the error for a response that is not stored.
    pub fn no_response(id: &str) -> ApiError {
        let shown: String = id.chars().take(60).collect();
        let message = format!(
            "there is no stored response `{shown}`; the server keeps the newest responses, and none across a restart"
        );
        ApiError::new(StatusCode::NOT_FOUND, message)
    }

    /// Returns the error for a previous response that is not stored.
    pub fn no_previous_response(id: &str) -> ApiError {
        let error = ApiError::no_response(id);
        ApiError { param: Some("previous_response_id".into()), code: Some("previous_response_not_found"), ..error }
    }

    /// Returns the same error for a request whose fields have other names: pairs of a name here, and the name that the client knows.
    pub fn renamed(self, names: &[(&str, &str)]) -> ApiError {
        let Some((from, to)) = names.iter().find(|(from, _)| self.param.as_deref() == Some(from)) else { return self };
        let named = |mark: char| (format!("`{from}{mark}"), format!("`{to}{mark}"));
        let message = ['`', '.'].map(named).iter().fold(self.message, |message, (from, to)| message.replace(from, to));
        ApiError { message, param: Some((*to).to_string()), ..self }
    }

    /// Returns the same error, which names the field `name` unless it names another one.
    pub fn within(self, name: &str) -> ApiError {
        ApiError { param: self.param.or_else(|| Some(name.into())), ..self }
    }

    /// Returns the same error with another status.
    pub fn with_status(self, status: StatusCode) -> ApiError {
        ApiError { status, ..self }
    }

    /// The HTTP status of the error.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The message of the error.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the error for a body of `bytes` bytes, which is more than `most`.
    pub fn too_large(bytes: &str, most: usize) -> ApiError {
        let message = format!("the body has {bytes} bytes; at most {most}");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// Returns the error for a request whose head is refused, or whose body cannot be received.
    pub fn refused(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError::new(status, message)
    }

    /// Returns the error for a missing or wrong key.
    pub fn unauthorized() -> ApiError {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        ApiError { code: Some("invalid_api_key"), ..ApiError::new(StatusCode::UNAUTHORIZED, message) }
    }

    /// Returns the error for a request beyond the `limit` of running and waiting requests.
    pub fn busy(limit: usize) -> ApiError {
        let message =
            format!("the server has reached its limit of {limit} running and waiting requests; try again later");
        ApiError { code: Some("rate_limit_exceeded"), ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message) }
    }

    /// Returns the error for a request that arrives while the server stops.
    pub fn stopping() -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping and takes no new requests")
    }

    /// Returns the error for a failure of the engine.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Converts an error of the engine, the tokenizer or the chat template to an error of the request.
    pub fn of_request(error: ottava_common::Error) -> ApiError {
        ApiError::invalid(error.to_string())
    }

    /// Returns the body of the error.
    pub fn json(&self) -> serde_json::Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, json_body(&self.json())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // Some paths have errors of another form.
        response.extensions_mut().insert(self);
        response
    }
}

/// Returns a response with a JSON body.
pub fn json_body(value: &serde_json::Value) -> impl IntoResponse + use<> {
    // Integers beyond 64 bits are special objects in memory.
    json_text(write_json(value))
}

/// Returns a response whose body is JSON text.
pub fn json_text(text: String) -> impl IntoResponse + use<> {
    ([(header::CONTENT_TYPE, "application/json")], text)
}
