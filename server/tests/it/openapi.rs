//! The OpenAPI document: every route, every field, nothing dangling.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::support::*;

fn document() -> Value {
    let (state, _) = toy_state(&Setup::default());
    let answer = get(&state, "/openapi.json");
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    answer.json()
}

#[test]
fn the_document_lists_every_route_and_every_route_answers() {
    let document = document();
    let mut listed: Vec<String> = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        listed.extend(item.as_object().unwrap().keys().map(|method| format!("{method} {path}")));
    }
    listed.sort();
    assert_eq!(
        listed,
        [
            "get /health",
            "get /info",
            "get /metrics",
            "get /openapi.json",
            "get /ready",
            "get /v1/models",
            "get /v1/models/{id}",
            "get /v1/models/{owner}/{name}",
            "post /detokenize",
            "post /tokenize",
            "post /v1/chat/completions",
            "post /v1/completions",
        ]
    );
    // Every handler of `src/routes` has its annotation, and only the page's routes are set up without one.
    let routes = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/routes");
    let mut annotated = 0;
    for file in std::fs::read_dir(routes).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        annotated += text.matches("#[utoipa::path(").count();
        assert!(!text.contains(".route(") || path.ends_with("page.rs"), "{path:?} hides a route");
    }
    assert_eq!(annotated, listed.len());
    let (state, _) = toy_state(&Setup::default());
    for route in &listed {
        let (method, path) = route.split_once(' ').unwrap();
        let request =
            Request::builder().method(method.to_uppercase().as_str()).uri(path.replace(['{', '}'], ""));
        let answer = oneshot(&state, request.body(Body::empty()).unwrap());
        let unknown = answer.text().contains("no route") || answer.status == 405;
        assert!(!unknown, "{route}: {}", answer.text());
    }
}

#[test]
fn fields_are_closed_bounded_and_their_types_are_there() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    for body in ["CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"] {
        assert_eq!(schemas[body]["additionalProperties"], json!(false), "{body}");
    }
    let answered = |route: &str, kind: &str| {
        document["paths"][route]["post"]["responses"]["200"]["content"][kind]["schema"]["$ref"].clone()
    };
    let told = ["application/json", "text/event-stream"].map(|kind| answered("/v1/chat/completions", kind));
    assert!(
        told[0].is_string()
            && told[0] != told[1]
            && told[0] != answered("/v1/completions", "application/json")
    );
    let completion = &schemas["CompletionRequest"];
    assert_eq!(completion["required"], json!(["prompt"]));
    assert_eq!(completion["properties"]["temperature"]["maximum"], json!(2));
    for field in ["grammar", "response_format", "logit_bias", "speculation", "canopy", "n"] {
        assert!(completion["properties"][field].is_object(), "{field}");
        assert!(schemas["ChatRequest"]["properties"][field].is_object(), "{field}");
    }
    for field in ["reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"] {
        assert_eq!(schemas["CompletionDetails"]["properties"][field]["type"], "integer", "{field}");
    }
    assert_eq!(
        schemas["Usage"]["properties"]["completion_tokens_details"]["$ref"],
        "#/components/schemas/CompletionDetails"
    );
    let mut open = vec![&document];
    let mut references = 0;
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
                    let name = target.strip_prefix("#/components/schemas/").unwrap();
                    assert!(schemas[name].is_object(), "{target} is not there");
                    references += 1;
                }
                open.extend(fields.values());
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    assert!(references > 20, "{references}");
    assert_eq!(document["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
}
